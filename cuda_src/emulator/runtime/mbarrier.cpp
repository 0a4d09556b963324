// mbarriers: phases that complete when all arrivals and all expected bytes are in.
#include <cstdio>

#include "emulator/runtime/hopper.h"

namespace cuflash::emulator {

static int offset_of(uint32_t address) { return static_cast<int>(address - kSharedBase); }

Mbarrier* look_up_mbarrier(Block& b, uint32_t address) {
  for (Mbarrier& barrier : b.hopper.mbarriers) {
    if (barrier.address == address) return &barrier;
  }
  return nullptr;
}

Mbarrier& find_mbarrier(Block& b, int thread, uint32_t address, Location at) {
  Mbarrier* barrier = look_up_mbarrier(b, address);
  if (barrier == nullptr) fail(thread, at, "mbarrier at smem%+d was never initialised", offset_of(address));
  // The object lies in shared memory: its first use must be ordered after its initialisation.
  if (b.race.enabled()) b.race.access(b, b.race.thread(thread), address - kSharedBase, 8, false, at);
  return *barrier;
}

static void complete_phase(Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.phase ^= 1;
  barrier.completions++;
  barrier.pending = barrier.count;
  barrier.completed_clock = barrier.arriving_clock;
  for (uint32_t warp = 0; warp < barrier.waiting.size(); ++warp) {
    for (uint32_t lanes = barrier.waiting[warp]; lanes != 0; lanes &= lanes - 1) {
      make_ready(static_cast<int>(warp) * 32 + __builtin_ctz(lanes));
    }
    barrier.waiting[warp] = 0;
  }
}

void complete_bytes(Block& b, Mbarrier& barrier, uint32_t bytes, const std::vector<uint32_t>& clock) {
  b.race.join(barrier.arriving_clock, clock);
  barrier.bytes -= bytes;
  complete_phase(barrier);
}

std::string describe_mbarrier_wait(Block& b, uint32_t address, uint32_t parity, Location at) {
  const Mbarrier& m = *look_up_mbarrier(b, address);
  char text[240];
  snprintf(text, sizeof text,
           "wait at %s:%d on mbarrier smem%+d for parity %u (in phase %u, %d of %d arrivals and %lld bytes missing)",
           base_name(at.file), at.line, offset_of(address), parity, m.phase, m.pending, m.count,
           static_cast<long long>(m.bytes));
  return text;
}

void mbarrier_init(uint32_t address, uint32_t arrivals, Location at) {
  Block& b = *block;
  shared_at(b, b.current, address, 8, Access::write, at);
  if (arrivals == 0 || arrivals > 1048575) fail(b.current, at, "mbarrier for %u arrivals", arrivals);
  Mbarrier* known = look_up_mbarrier(b, address);
  Mbarrier& barrier = known ? *known : b.hopper.mbarriers.emplace_back();
  barrier = Mbarrier{};
  barrier.address = address;
  barrier.count = barrier.pending = static_cast<int32_t>(arrivals);
  barrier.initialiser = b.current;
  barrier.engine = b.hopper.engines++;
  barrier.waiting.assign(b.threads / 32, 0);
}

void mbarrier_init_fence() {
  for (Mbarrier& barrier : block->hopper.mbarriers) {
    if (barrier.initialiser == block->current) barrier.fenced = true;
  }
}

void mbarrier_arrive(uint32_t address, uint32_t expected_bytes, Location at) {
  Block& b = *block;
  Mbarrier& barrier = find_mbarrier(b, b.current, address, at);
  if (barrier.pending == 0) {
    fail(b.current, at, "too many arrivals on mbarrier smem%+d: its phase takes %d", offset_of(address), barrier.count);
  }
  b.race.release(barrier.arriving_clock, b.current);
  barrier.bytes += expected_bytes;
  barrier.pending--;
  complete_phase(barrier);
  perhaps_yield();
}

static bool has_completed(const Mbarrier& barrier, uint32_t parity) { return barrier.phase != (parity & 1); }

bool mbarrier_test(uint32_t address, uint32_t parity, Location at) {
  Block& b = *block;
  if (has_completed(find_mbarrier(b, b.current, address, at), parity)) {
    b.race.acquire(look_up_mbarrier(b, address)->completed_clock, b.current);
    return true;
  }
  yield();  // a loop of tests must let others run
  return false;
}

void mbarrier_wait(uint32_t address, uint32_t parity, Location at) {
  Block& b = *block;
  const int thread = b.current;
  if (parity > 1) fail(thread, at, "parity %u of mbarrier smem%+d is neither 0 nor 1", parity, offset_of(address));
  Mbarrier* barrier = &find_mbarrier(b, thread, address, at);
  if (!has_completed(*barrier, parity)) {
    const uint64_t before = barrier->completions;
    barrier->waiting[thread / 32] |= 1u << thread % 32;
    suspend(Wait::mbarrier, "mbarrier_wait", at, address, parity);
    barrier = look_up_mbarrier(b, address);  // the table may have moved
    // On the GPU such a thread may miss its phase and wait for ever.
    if (barrier->completions != before + 1) {
      fail(thread, at, "mbarrier smem%+d completed %llu phases while this thread waited for one", offset_of(address),
           static_cast<unsigned long long>(barrier->completions - before));
    }
  }
  b.race.acquire(barrier->completed_clock, thread);
}

}  // namespace cuflash::emulator
