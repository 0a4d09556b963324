// Bulk copies: issued by a thread, performed by the scheduler at a moment of its choice.
#include "emulator/runtime/hopper.h"

namespace cuflash::emulator {

static uint32_t box_bytes(const TensorMapImage& map) {
  uint32_t bytes = map.element_bytes;
  for (int d = 0; d < map.rank; ++d) bytes *= map.box[d];
  return bytes;
}

// Where each row begins is a matter of its pitch; what counts as arrived is the box.
static uint32_t box_footprint(const TensorMapImage& map) {
  return box_bytes(map) / (map.box[0] * map.element_bytes) * row_pitch(map);
}

static bool any_in_flight(const std::vector<uint8_t>& marks, uint32_t unit, uint32_t offset, uint32_t bytes) {
  for (uint32_t i = offset / unit; i <= (offset + bytes - 1) / unit; ++i) {
    if (marks[i] != 0) return true;
  }
  return false;
}

// An H200 answers each of these with an illegal instruction, or worse.
static void check_tensor_copy(Block& b, BulkKind kind, const TensorMapImage& map, int rank, uint32_t shared,
                              const int* coordinates, Location at) {
  if (reinterpret_cast<uint64_t>(&map) % 64 != 0) fail(b.current, at, "tensor map at %p is not 64-byte aligned", &map);
  if (map.magic != kTensorMapMagic) fail(b.current, at, "tensor map was never encoded");
  if (map.rank != rank) fail(b.current, at, "instruction of rank %d on a tensor map of rank %d", rank, map.rank);
  if (coordinates[0] * map.element_bytes % 16 != 0) {
    fail(b.current, at, "innermost coordinate %d: a box must begin at a multiple of 16 bytes", coordinates[0]);
  }
  for (int d = 0; d < rank && kind != BulkKind::load; ++d) {
    if (coordinates[d] >= 0) continue;
    fail(b.current, at, "coordinate %d of dimension %d: only loads may begin before the tensor", coordinates[d], d);
  }
  if (shared % 128 != 0) fail(b.current, at, "tensor copy at smem+%u: not 128-byte aligned", shared - kSharedBase);
}

static void begin_load(Block& b, BulkCopy& copy) {
  const uint32_t offset = copy.shared - kSharedBase;
  Mbarrier& barrier = find_mbarrier(b, copy.thread, copy.barrier, copy.at);
  if (!barrier.fenced) {
    fail(copy.thread, copy.at, "bulk copy reports to mbarrier smem+%u, which lacks mbarrier_init_fence",
         copy.barrier - kSharedBase);
  }
  if (any_in_flight(b.writes_in_flight, 4, offset, copy.footprint)) {
    fail(copy.thread, copy.at, "bulk copy into smem+%u while another copy into it is in flight", offset);
  }
  if (any_in_flight(b.reads_in_flight, 16, offset, copy.footprint)) {
    fail(copy.thread, copy.at, "bulk copy into smem+%u while an asynchronous read of it has not been waited for",
         offset);
  }
  if (b.race.enabled()) {
    copy.clock = b.race.snapshot(copy.thread);
    const Actor engine = b.race.copy_engine(copy.thread, barrier.engine, copy.clock);
    b.race.access(b, engine, offset, copy.footprint, true, copy.at);
    copy.clock[engine.clock_index] = engine.now;
  }
  if (b.options->poison) std::memset(b.shared + offset, 0xff, copy.footprint);
  mark_writes(b, offset, copy.footprint, +1);
}

static void begin_store(Block& b, BulkCopy& copy) {
  const uint32_t offset = copy.shared - kSharedBase;
  if (any_in_flight(b.writes_in_flight, 4, offset, copy.footprint)) {
    fail(copy.thread, copy.at, "bulk store from smem+%u while an asynchronous copy into it is in flight", offset);
  }
  if (b.race.enabled()) {
    Actor reader = b.race.thread(copy.thread);
    reader.async_proxy = true;
    b.race.access(b, reader, offset, copy.footprint, false, copy.at);
  }
  mark_reads(b, offset, copy.footprint, +1);
  HopperThread& h = b.fibers[copy.thread].hopper;
  copy.group = h.bulk_group;
  h.bulk_pending.resize(h.bulk_group + 1, 0);
  h.bulk_pending[copy.group]++;
  h.bulk_sources.push_back({offset, copy.footprint, copy.group, copy.at});
}

static void issue(Block& b, BulkCopy copy) {
  check_shared_range(b, copy.thread, copy.shared, copy.footprint, "bulk copy", copy.at);
  if (copy.kind == BulkKind::load) begin_load(b, copy);
  else begin_store(b, copy);
  b.statistics.bulk_bytes += copy.bytes;
  b.hopper.in_flight.push_back(std::move(copy));
  if (b.options->timing == static_cast<int>(Timing::eager)) run_bulk_copy(b, b.hopper.in_flight.size() - 1);
  else perhaps_yield();
}

void tma(BulkKind kind, const ptx::TensorMap* map, uint32_t shared, uint32_t barrier, const int* coordinates, int rank,
         Location at) {
  Block& b = *block;
  const auto* image = reinterpret_cast<const TensorMapImage*>(map);
  check_tensor_copy(b, kind, *image, rank, shared, coordinates, at);
  const uint32_t bytes = box_bytes(*image), footprint = box_footprint(*image);
  BulkCopy copy{kind, image, nullptr, shared, bytes, footprint, barrier, {}, b.current, 0, {}, at};
  for (int d = 0; d < rank; ++d) copy.coordinates[d] = coordinates[d];
  issue(b, std::move(copy));
}

void bulk(BulkKind kind, const void* global, uint32_t shared, uint32_t bytes, uint32_t barrier, Location at) {
  Block& b = *block;
  if (shared % 16 != 0 || bytes % 16 != 0 || bytes == 0 || reinterpret_cast<uint64_t>(global) % 16 != 0) {
    fail(b.current, at, "bulk copy of %u bytes between smem+%u and %p: all three must be multiples of 16", bytes,
         shared - kSharedBase, global);
  }
  const Access access = kind == BulkKind::load ? Access::read : Access::write;
  check_global(b, b.current, global, bytes, access, "bulk copy", at);
  auto* place = static_cast<uint8_t*>(const_cast<void*>(global));
  issue(b, BulkCopy{kind, nullptr, place, shared, bytes, bytes, barrier, {}, b.current, 0, {}, at});
}

void bulk_commit() { block->fibers[block->current].hopper.bulk_group++; }

void bulk_wait(int groups, bool read_only, Location at) {
  Block& b = *block;
  HopperThread& h = b.fibers[b.current].hopper;
  const int64_t end = int64_t{h.bulk_group} - groups;  // groups before this one must be done
  const auto busy = [&] {
    for (int64_t g = 0; g < end && g < static_cast<int64_t>(h.bulk_pending.size()); ++g) {
      if (h.bulk_pending[g] != 0) return true;
    }
    return false;
  };
  while (busy()) suspend(Wait::bulk_group, read_only ? "bulk_wait_read" : "bulk_wait", at, 0, 0);
  std::erase_if(h.bulk_sources, [&](const BulkSource& source) {
    if (int64_t{source.group} >= end) return false;
    mark_reads(b, source.offset, source.bytes, -1);
    return true;
  });
}

void fence_proxy_async() { block->fibers[block->current].hopper.proxy_fences++; }

void reset_hopper(HopperThread& h, uint32_t block_threads) {
  h.proxy_fences = 1;
  h.bulk_group = h.wgmma_group = 0;
  h.bulk_pending.clear();
  h.bulk_sources.clear();
  h.wgmma.clear();
  h.dropped = h.retired = 0;
  h.accumulators.clear();
  h.wgmma_fenced = false;
  h.registers = registers_at_start(block_threads);
}

void check_hopper_exit(Block& b, int thread) {
  const HopperThread& h = b.fibers[thread].hopper;
  if (!h.bulk_sources.empty()) {
    fail(thread, h.bulk_sources.front().at, "the thread exits while this store may still read shared memory");
  }
  if (h.retired < h.issued()) {
    fail(thread, h.product(h.retired).at, "the thread exits while this wgmma is in flight");
  }
  if (b.exited + 1 < static_cast<int>(b.threads)) return;
  for (const BulkCopy& copy : b.hopper.in_flight) {
    if (copy.kind == BulkKind::load) fail(copy.thread, copy.at, "the block ends while this copy is in flight");
  }
}

}  // namespace cuflash::emulator
