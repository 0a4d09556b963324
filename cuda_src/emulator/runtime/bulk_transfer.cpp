// What a bulk copy does when it happens: boxes of tensors in and out of swizzled shared memory, clipped at the edges.
#include <algorithm>

#include "emulator/runtime/half.h"
#include "emulator/runtime/hopper.h"

namespace cuflash::emulator {

constexpr uint32_t kMaxRowBytes = 256 * 4;
constexpr uint32_t kChunk = 16;  // a swizzle moves chunks of this many bytes

// One row of a box: where it lies in global memory, and which of its elements are inside the tensor.
struct Row {
  uint8_t* first;        // of the elements that are inside
  uint32_t skip, bytes;  // of the row before them, and of them
};

static Row row_of(const BulkCopy& copy, uint32_t index) {
  const TensorMapImage& map = *copy.map;
  auto* address = reinterpret_cast<uint8_t*>(map.base);
  for (int d = 1; d < map.rank; ++d) {
    const int64_t x = copy.coordinates[d] + static_cast<int64_t>(index % map.box[d]);
    index /= map.box[d];
    if (x < 0 || x >= static_cast<int64_t>(map.dims[d])) return {nullptr, 0, 0};
    address += x * static_cast<int64_t>(map.strides[d - 1]);
  }
  const int64_t begin = copy.coordinates[0], end = begin + map.box[0];
  const int64_t low = std::clamp<int64_t>(begin, 0, map.dims[0]), high = std::clamp<int64_t>(end, 0, map.dims[0]);
  if (low >= high) return {nullptr, 0, 0};
  const int64_t size = map.element_bytes;
  const auto skip = static_cast<uint32_t>((low - begin) * size), bytes = static_cast<uint32_t>((high - low) * size);
  return {address + low * size, skip, bytes};
}

static uint16_t add_16bit(uint16_t x, uint16_t y, ElementKind kind) {
  if (kind == ElementKind::bfloat16) return bfloat16_from_float(float_from_bfloat16(x) + float_from_bfloat16(y));
  return float16_from_float(float_from_float16(x) + float_from_float16(y));
}

static void add_bytes(uint8_t* to, const uint8_t* from, uint32_t bytes, ElementKind kind) {
  const uint32_t size = kind == ElementKind::float32 ? 4 : 2;
  for (uint32_t i = 0; i < bytes; i += size) {
    if (size == 4) {
      float value;
      std::memcpy(&value, from + i, 4);
      atomic_add_float(reinterpret_cast<float*>(to + i), value);
      continue;
    }
    uint16_t value;
    std::memcpy(&value, from + i, 2);
    auto* place = reinterpret_cast<uint16_t*>(to + i);
    uint16_t old = __atomic_load_n(place, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(place, &old, add_16bit(old, value, kind), true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
    }
  }
}

static void transfer_box(Block& b, const BulkCopy& copy) {
  const TensorMapImage& map = *copy.map;
  const uint32_t row_bytes = map.box[0] * map.element_bytes, pitch = row_pitch(map), rows = copy.footprint / pitch;
  uint8_t line[kMaxRowBytes];
  const auto chunk_at = [&](uint32_t row, uint32_t begin) {
    return b.shared + (swizzled(copy.shared + row * pitch + begin, map.swizzle) - kSharedBase);
  };
  for (uint32_t r = 0; r < rows; ++r) {
    const Row row = row_of(copy, r);
    if (copy.kind == BulkKind::load) {
      std::memset(line, 0, row_bytes);
      if (row.bytes != 0) {
        check_global(b, copy.thread, row.first, row.bytes, Access::read, "tensor load", copy.at);
        std::memcpy(line + row.skip, row.first, row.bytes);
      }
      for (uint32_t i = 0; i < row_bytes; i += kChunk) std::memcpy(chunk_at(r, i), line + i, kChunk);
      continue;
    }
    if (row.bytes == 0) continue;
    for (uint32_t i = 0; i < row_bytes; i += kChunk) std::memcpy(line + i, chunk_at(r, i), kChunk);
    check_global(b, copy.thread, row.first, row.bytes, Access::write, "tensor store", copy.at);
    if (copy.kind == BulkKind::store) std::memcpy(row.first, line + row.skip, row.bytes);
    else add_bytes(row.first, line + row.skip, row.bytes, static_cast<ElementKind>(map.dtype));
  }
}

static void transfer_line(Block& b, const BulkCopy& copy) {
  uint8_t* shared = b.shared + (copy.shared - kSharedBase);
  if (copy.kind == BulkKind::load) std::memcpy(shared, copy.global, copy.bytes);
  else if (copy.kind == BulkKind::store) std::memcpy(copy.global, shared, copy.bytes);
  else add_bytes(copy.global, shared, copy.bytes, ElementKind::float32);
}

void run_bulk_copy(Block& b, size_t index) {
  std::vector<BulkCopy>& list = b.hopper.in_flight;
  const BulkCopy copy = std::move(list[index]);
  if (index + 1 < list.size()) list[index] = std::move(list.back());
  list.pop_back();
  if (copy.map != nullptr) transfer_box(b, copy);
  else transfer_line(b, copy);
  if (copy.kind == BulkKind::load) {
    mark_writes(b, copy.shared - kSharedBase, copy.footprint, -1);
    complete_bytes(b, *look_up_mbarrier(b, copy.barrier), copy.bytes, copy.clock);
    return;
  }
  Fiber& f = b.fibers[copy.thread];
  f.hopper.bulk_pending[copy.group]--;
  if (f.wait == Wait::bulk_group) make_ready(copy.thread);
}

}  // namespace cuflash::emulator
