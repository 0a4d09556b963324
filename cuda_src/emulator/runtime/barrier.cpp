// Barriers of a block: the block's own (id 0) and fifteen named ones.
#include "emulator/runtime/state.h"

namespace cuflash::emulator {

static void complete(Block& b, Barrier& barrier) {
  if (b.race.enabled()) {
    for (int warp = 0; warp < kMaxWarps; ++warp) {
      for (uint32_t lanes = barrier.waiting[warp]; lanes != 0; lanes &= lanes - 1) {
        b.race.acquire(barrier.clock, warp * 32 + __builtin_ctz(lanes));
      }
    }
    barrier.clock.clear();
  }
  make_ready(barrier.waiting);
  std::memset(barrier.waiting, 0, sizeof barrier.waiting);
  barrier.arrived = 0;
  barrier.result = barrier.vote;
  barrier.vote = false;
  b.statistics.barriers++;
}

void barrier(int id, int count, bool waits, Location at) {
  Block& b = *block;
  const int thread = b.current;
  if (id < 0 || id > 15) fail(thread, at, "barrier %d does not exist: ids are 0 to 15", id);
  if (count < 32 || count % 32 != 0 || count > static_cast<int>(b.threads)) {
    fail(thread, at, "barrier %d for %d threads: needs a multiple of 32 up to the block's %u", id, count, b.threads);
  }
  Barrier& barrier = b.barriers[id];
  if (barrier.arrived != 0 && barrier.expected != count) {
    fail(thread, at, "barrier %d for %d threads, while others use it for %d", id, count, barrier.expected);
  }
  barrier.expected = count;
  b.race.release(barrier.clock, thread);
  const bool last = ++barrier.arrived == count;
  if (waits) barrier.waiting[thread / 32] |= 1u << thread % 32;
  if (last) {
    if (waits) {
      b.race.acquire(barrier.clock, thread);
      barrier.waiting[thread / 32] &= ~(1u << thread % 32);
    }
    complete(b, barrier);
    if (b.options->random_order) yield();
  } else if (waits) {
    suspend(Wait::barrier, "barrier", at, static_cast<uint32_t>(id));
  }
}

// The result stands until every thread of the block has come to the next phase, so each still reads its own.
bool barrier_or(bool predicate, Location at) {
  Barrier& own = block->barriers[0];
  own.vote |= predicate;
  barrier(0, static_cast<int>(block->threads), true, at);
  return own.result;
}

}  // namespace cuflash::emulator
