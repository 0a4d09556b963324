// Which thread runs next, how a thread waits, what is said when none can run.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <tuple>

#include "emulator/runtime/hopper.h"
#include "emulator/runtime/state.h"
#include "emulator/runtime/watchdog.h"

namespace cuflash::emulator {

thread_local Block* block = nullptr;

static int first_set(uint32_t mask) { return __builtin_ctz(mask); }

// Stays in a warp while it has ready lanes, but leaves it at random, and begins at a random lane.
static int pick_random(Block& b) {
  const uint32_t r = b.random();
  if (b.ready[b.warp] == 0 || r % 32 == 0) {
    uint32_t warps = b.ready_warps;
    for (int skip = static_cast<int>((r >> 5) % __builtin_popcount(warps)); skip > 0; --skip) warps &= warps - 1;
    b.warp = first_set(warps);
  }
  const uint32_t shift = (r >> 10) % 32;
  const uint32_t lanes = b.ready[b.warp];
  const uint32_t rotated = shift == 0 ? lanes : lanes >> shift | lanes << (32 - shift);
  return static_cast<int>((first_set(rotated) + shift) % 32);
}

static uint32_t above(uint32_t mask, int bit) { return bit >= 31 ? 0 : bit < 0 ? mask : mask & ~((2u << bit) - 1); }

// In turn: the next ready lane of this warp, then the next warp. Whoever yields thereby lets everybody else run.
static int pick_ascending(Block& b) {
  uint32_t lanes = above(b.ready[b.warp], b.lane);
  if (lanes == 0) {
    const uint32_t later = above(b.ready_warps, b.warp);
    b.warp = first_set(later != 0 ? later : b.ready_warps);
    lanes = b.ready[b.warp];
  }
  return b.lane = first_set(lanes);
}

static int take_ready(Block& b) {
  if (b.ready_warps == 0) return -1;
  const int lane = b.options->random_order ? pick_random(b) : pick_ascending(b);
  b.ready[b.warp] &= ~(1u << lane);
  if (b.ready[b.warp] == 0) b.ready_warps &= ~(1u << b.warp);
  return b.warp * 32 + lane;
}

void make_ready(int thread) {
  Block& b = *block;
  b.ready[thread / 32] |= 1u << thread % 32;
  b.ready_warps |= 1u << thread / 32;
}

void make_ready(const ThreadSet& threads) {
  Block& b = *block;
  for (int warp = 0; warp < kMaxWarps; ++warp) {
    if (threads[warp] == 0) continue;
    b.ready[warp] |= threads[warp];
    b.ready_warps |= 1u << warp;
  }
}

static std::string describe_wait(Block& b, const Fiber& f, const std::vector<int>& who) {
  char text[400];
  const int n = snprintf(text, sizeof text, "\n  %zu thread%s [%d..%d] ", who.size(), who.size() == 1 ? "" : "s",
                         who.front(), who.back());
  char* rest = text + n;
  const size_t room = sizeof text - n;
  const char* file = base_name(f.at.file);
  if (f.wait == Wait::exited) {
    snprintf(rest, room, "exited");
  } else if (f.wait == Wait::barrier) {
    const Barrier& barrier = b.barriers[f.wait_a];
    snprintf(rest, room, "wait at %s:%d on barrier %u (%d of %d arrived)", file, f.at.line, f.wait_a, barrier.arrived,
             barrier.expected);
  } else if (f.wait == Wait::mbarrier) {
    return text + describe_mbarrier_wait(b, f.wait_a, f.wait_b, f.at);
  } else if (f.wait == Wait::warp) {
    snprintf(rest, room, "wait at %s:%d in %s (%d of 32 lanes arrived)", file, f.at.line, f.waits_in,
             b.warps[who.back() / 32].arrived);
  } else {
    snprintf(rest, room, "wait at %s:%d in %s (%u of %u)", file, f.at.line, f.waits_in, f.wait_a, f.wait_b);
  }
  return text;
}

static void report_deadlock(Block& b) {
  using Key = std::tuple<Wait, std::string, int, uint32_t, std::string>;
  std::map<Key, std::vector<int>> groups;
  for (int t = 0; t < static_cast<int>(b.threads); ++t) {
    const Fiber& f = b.fibers[t];
    const bool gone = f.wait == Wait::exited;
    const bool numbered = f.wait == Wait::barrier || f.wait == Wait::mbarrier;
    groups[{f.wait, gone ? "" : f.at.file, gone ? 0 : f.at.line, numbered ? f.wait_a : 0, gone ? "" : f.waits_in}]
        .push_back(t);
  }
  b.error = "deadlock: no thread of block " + std::to_string(b.index) + " can run";
  for (auto& [key, who] : groups) b.error += describe_wait(b, b.fibers[who.back()], who);
}

static void leave(Block& b, Context& from) {
  switch_context(from, b.main);
  std::abort();  // an abandoned fiber never comes back
}

static void run_next(Context& from, int self) {
  Block& b = *block;
  for (;;) {
    if (watchdog_fired()) b.error = watchdog_report(b);
    if (!b.error.empty()) break;
    if (!b.hopper.in_flight.empty() && b.options->timing == static_cast<int>(Timing::random) && b.chance(8)) {
      run_bulk_copy(b, b.random() % b.hopper.in_flight.size());
    }
    const int next = take_ready(b);
    if (next >= 0) {
      b.current = next;
      if (next == self) return;
      b.statistics.switches++;
      switch_context(from, b.fibers[next].context);
      return;
    }
    if (!b.hopper.in_flight.empty()) {
      const bool random = b.options->timing == static_cast<int>(Timing::random);
      run_bulk_copy(b, random ? b.random() % b.hopper.in_flight.size() : 0);
      continue;
    }
    if (b.exited < static_cast<int>(b.threads)) report_deadlock(b);
    break;
  }
  if (&from != &b.main) leave(b, from);
}

void suspend(Wait wait, const char* name, Location at, uint32_t a, uint32_t b_) {
  Block& b = *block;
  Fiber& f = b.fibers[b.current];
  f.wait = wait;
  f.waits_in = name;
  f.at = at;
  f.wait_a = a;
  f.wait_b = b_;
  run_next(f.context, b.current);
  f.wait = Wait::nothing;
}

void yield() {
  Block& b = *block;
  if (b.ready_warps == 0 && b.hopper.in_flight.empty() && !watchdog_fired()) return;
  const int self = b.current;
  make_ready(self);
  run_next(b.fibers[self].context, self);
}

void perhaps_yield() {
  Block& b = *block;
  if (b.options->random_order && b.chance(8)) yield();
}

void fail(int thread, Location at, const char* format, ...) {
  Block& b = *block;
  char message[700], head[300];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  snprintf(head, sizeof head, "%s:%d: thread %d (warp %d lane %d) of block %u: ", base_name(at.file), at.line, thread,
           thread / 32, thread % 32, b.index);
  b.error = std::string(head) + message;
  leave(b, b.fibers[b.current].context);
  std::abort();
}

static void run_thread() {
  Block& b = *block;
  b.entry(b.params);
  const int self = b.current;
  check_hopper_exit(b, self);
  Fiber& f = b.fibers[self];
  f.wait = Wait::exited;
  b.exited++;
  run_next(f.context, self);
}

constexpr size_t kStaggerBytes = 1344;  // else the hot lines of all stacks would compete for the same cache sets
constexpr size_t kStaggerRange = 49152;

void run_block(Block& b) {
  block = &b;
  for (int t = 0; t < static_cast<int>(b.threads); ++t) {
    Fiber& f = b.fibers[t];
    const size_t stagger = t * kStaggerBytes % kStaggerRange & ~size_t{63};
    prepare_context(f.context, f.stack, kStackBytes - stagger, run_thread);
    make_ready(t);
  }
  run_next(b.main, -1);
  block = nullptr;
}

}  // namespace cuflash::emulator
