// Bounds, alignment and readiness of every access, and the accesses themselves.
#include <algorithm>
#include <cstdio>

#include "emulator/runtime/state.h"

namespace cuflash::emulator {

static const char* verb(Access access) {
  return access == Access::read ? "read" : access == Access::write ? "write" : "atomic";
}

void check_shared_range(Block& b, int thread, uint32_t address, uint32_t bytes, const char* what, Location at) {
  const int64_t offset = static_cast<int64_t>(address) - kSharedBase;
  if (offset >= 0 && offset + bytes <= b.shared_bytes) return;
  fail(thread, at, "out-of-bounds shared %s of %u bytes at smem%+lld (the block has %u bytes)", what, bytes,
       static_cast<long long>(offset), b.shared_bytes);
}

static void change_marks(std::vector<uint8_t>& marks, uint32_t first, uint32_t last, int change) {
  for (uint32_t i = first; i <= last; ++i) marks[i] = static_cast<uint8_t>(marks[i] + change);
}

void mark_writes(Block& b, uint32_t offset, uint32_t bytes, int change) {
  change_marks(b.writes_in_flight, offset / 4, (offset + bytes - 1) / 4, change);
}

void mark_reads(Block& b, uint32_t offset, uint32_t bytes, int change) {
  change_marks(b.reads_in_flight, offset / 16, (offset + bytes - 1) / 16, change);
}

static bool any(const uint8_t* marks, uint32_t first, uint32_t last) {
  for (uint32_t i = first; i <= last; ++i) {
    if (marks[i] != 0) return true;
  }
  return false;
}

uint8_t* shared_at(Block& b, int thread, uint32_t address, uint32_t bytes, Access access, Location at) {
  const uint32_t offset = address - kSharedBase;
  if (address < kSharedBase || offset + bytes > b.shared_bytes || offset + bytes < offset) {
    check_shared_range(b, thread, address, bytes, verb(access), at);
  }
  if (address % bytes != 0) {
    fail(thread, at, "misaligned shared %s of %u bytes at smem+%u", verb(access), bytes, offset);
  }
  if (any(b.writes_in_flight.data(), offset / 4, (offset + bytes - 1) / 4)) {
    fail(thread, at, "shared %s of %u bytes at smem+%u while an asynchronous copy into it has not been waited for",
         verb(access), bytes, offset);
  }
  if (access != Access::read && any(b.reads_in_flight.data(), offset / 16, (offset + bytes - 1) / 16)) {
    fail(thread, at, "shared %s of %u bytes at smem+%u while an asynchronous read of it has not been waited for",
         verb(access), bytes, offset);
  }
  if (b.race.enabled()) b.race.access(b, b.race.thread(thread), offset, bytes, access != Access::read, at);
  return b.shared + offset;
}

// True if [offset, offset + bytes) of the buffer is one contiguous run of its elements.
static bool in_run(const Buffer& buffer, uint64_t offset, uint64_t bytes) {
  for (int d = 0; d < buffer.dims; ++d) {
    const uint64_t index = std::min(offset / buffer.strides[d], buffer.extents[d] - 1);
    offset -= index * buffer.strides[d];
  }
  return offset + bytes <= buffer.run_bytes;
}

static bool holds(const Buffer& buffer, uint64_t address, uint64_t bytes) {
  return address >= buffer.base && address + bytes <= buffer.base + buffer.bytes;
}

[[noreturn]] static void report_global(Block& b, int thread, uint64_t address, size_t bytes, const char* what,
                                       Location at) {
  const Buffer* nearest = nullptr;
  int64_t distance = 0, offset = 0;
  for (int i = 0; i < b.buffer_count; ++i) {
    const Buffer& buffer = b.buffers[i];
    const auto from_base = static_cast<int64_t>(address - buffer.base);
    const int64_t past = from_base + static_cast<int64_t>(bytes) - static_cast<int64_t>(buffer.bytes);
    const int64_t away = std::max<int64_t>({0, -from_base, past});
    if (nearest != nullptr && away >= distance) continue;
    nearest = &buffer;
    distance = away;
    offset = from_base;
  }
  if (nearest == nullptr) fail(thread, at, "global %s of %zu bytes, and no array is registered", what, bytes);
  if (distance == 0) {
    fail(thread, at, "out-of-bounds global %s of %zu bytes: byte %lld of %s is between its rows", what, bytes,
         static_cast<long long>(offset), nearest->name);
  }
  fail(thread, at, "out-of-bounds global %s of %zu bytes at byte %lld of %s (nearest array, %llu bytes)", what, bytes,
       static_cast<long long>(offset), nearest->name, static_cast<unsigned long long>(nearest->bytes));
}

void check_global(Block& b, int thread, const void* pointer, size_t bytes, Access access, const char* what,
                  Location at) {
  const auto address = reinterpret_cast<uint64_t>(pointer);
  for (int tried = 0; tried < b.buffer_count; ++tried) {
    const int i = (b.buffer_hint + tried) % b.buffer_count;
    const Buffer& buffer = b.buffers[i];
    if (!holds(buffer, address, bytes)) continue;
    if (buffer.dims != 0 && !in_run(buffer, address - buffer.base, bytes)) continue;
    if (access != Access::read && !buffer.writable) {
      fail(thread, at, "%s into the read-only array %s", what, buffer.name);
    }
    b.buffer_hint = i;
    return;
  }
  report_global(b, thread, address, bytes, what, at);
}

static void check_aligned_global(Block& b, const void* pointer, uint32_t bytes, Access access, Location at) {
  if (reinterpret_cast<uint64_t>(pointer) % bytes != 0) {
    fail(b.current, at, "misaligned global %s of %u bytes at %p", verb(access), bytes, pointer);
  }
  check_global(b, b.current, pointer, bytes, access, verb(access), at);
}

void load_shared(void* value, uint32_t address, uint32_t bytes, Location at) {
  Block& b = *block;
  std::memcpy(value, shared_at(b, b.current, address, bytes, Access::read, at), bytes);
}

void store_shared(uint32_t address, const void* value, uint32_t bytes, Location at) {
  Block& b = *block;
  std::memcpy(shared_at(b, b.current, address, bytes, Access::write, at), value, bytes);
}

void load_global(void* value, const void* pointer, uint32_t bytes, Location at) {
  check_aligned_global(*block, pointer, bytes, Access::read, at);
  std::memcpy(value, pointer, bytes);
}

void store_global(void* pointer, const void* value, uint32_t bytes, Location at) {
  check_aligned_global(*block, pointer, bytes, Access::write, at);
  std::memcpy(pointer, value, bytes);
}

void atomic_add_float(float* pointer, float value) {
  auto* bits = reinterpret_cast<uint32_t*>(pointer);
  uint32_t old = __atomic_load_n(bits, __ATOMIC_RELAXED), sum;
  do {
    sum = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, old) + value);
  } while (!__atomic_compare_exchange_n(bits, &old, sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

void red_add(float* pointer, const float* values, int count, Location at) {
  check_aligned_global(*block, pointer, static_cast<uint32_t>(count) * 4, Access::atomic, at);
  for (int i = 0; i < count; ++i) atomic_add_float(pointer + i, values[i]);
}

uint32_t atomic_add(uint32_t* pointer, uint32_t value, Location at) {
  check_aligned_global(*block, pointer, 4, Access::atomic, at);
  return __atomic_fetch_add(pointer, value, __ATOMIC_SEQ_CST);
}

uint32_t load_acquire(const uint32_t* pointer, Location at) {
  check_aligned_global(*block, pointer, 4, Access::read, at);
  yield();  // a loop of loads must let others run
  return __atomic_load_n(pointer, __ATOMIC_ACQUIRE);
}

void store_release(uint32_t* pointer, uint32_t value, Location at) {
  check_aligned_global(*block, pointer, 4, Access::write, at);
  __atomic_store_n(pointer, value, __ATOMIC_RELEASE);
}

}  // namespace cuflash::emulator
