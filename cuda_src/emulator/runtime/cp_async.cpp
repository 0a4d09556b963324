// cp.async: the copy happens when its group is waited for, the latest moment the program allows. Until then its
// destination holds poison and may not be touched.
#include "emulator/runtime/state.h"

namespace cuflash::emulator {

static void perform(Block& b, const Copy& copy) {
  uint8_t* dst = b.shared + (copy.dst - kSharedBase);
  if (copy.valid_bytes != 0) std::memcpy(dst, copy.src, copy.valid_bytes);
  std::memset(dst + copy.valid_bytes, 0, copy.bytes - copy.valid_bytes);
}

void cp_async(uint32_t dst, const void* src, int bytes, int valid_bytes, Location at) {
  Block& b = *block;
  const int thread = b.current;
  if (valid_bytes < 0 || valid_bytes > bytes) {
    fail(thread, at, "cp.async of %d bytes with %d valid ones", bytes, valid_bytes);
  }
  if (valid_bytes != 0) {
    if (reinterpret_cast<uint64_t>(src) % bytes != 0) {
      fail(thread, at, "misaligned cp.async of %d bytes from %p", bytes, src);
    }
    check_global(b, thread, src, valid_bytes, Access::read, "read by cp.async", at);
  }
  uint8_t* target = shared_at(b, thread, dst, static_cast<uint32_t>(bytes), Access::write, at);
  b.statistics.cp_async_bytes += valid_bytes;
  Fiber& f = b.fibers[thread];
  const Copy copy{src, dst, static_cast<uint16_t>(bytes), static_cast<uint16_t>(valid_bytes), f.copy_group, at};
  if (b.options->timing == static_cast<int>(Timing::eager)) {
    perform(b, copy);
    return;
  }
  if (b.options->poison) std::memset(target, 0xff, bytes);
  mark_writes(b, dst - kSharedBase, bytes, +1);
  f.copies.push_back(copy);
}

void cp_async_commit() { block->fibers[block->current].copy_group++; }

void cp_async_wait(int groups, Location) {
  Block& b = *block;
  const int thread = b.current;
  Fiber& f = b.fibers[thread];
  for (; f.first_copy < f.copies.size(); ++f.first_copy) {
    const Copy& copy = f.copies[f.first_copy];
    if (copy.group + static_cast<uint32_t>(groups) >= f.copy_group) break;
    mark_writes(b, copy.dst - kSharedBase, copy.bytes, -1);
    shared_at(b, thread, copy.dst, copy.bytes, Access::write, copy.at);
    perform(b, copy);
  }
  if (f.first_copy == f.copies.size()) {
    f.copies.clear();
    f.first_copy = 0;
  }
}

}  // namespace cuflash::emulator
