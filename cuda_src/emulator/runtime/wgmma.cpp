// wgmma as threads see it: issue, commit, wait. A product is computed when the first warp waits for it; until a thread
// has waited, its accumulators hold poison and the operands in shared memory may not change.
#include "emulator/runtime/wgmma.h"

#include <algorithm>

#include "emulator/runtime/wgmma_compute.h"

namespace cuflash::emulator {

constexpr int kRowsOfWarp = 16;

static HopperThread& hopper_of(Block& b, int thread) { return b.fibers[thread].hopper; }

static Accumulator& accumulator_for(Block& b, HopperThread& h, float* d, int count) {
  for (Accumulator& accumulator : h.accumulators) {
    if (accumulator.registers == d) return accumulator;
  }
  Accumulator& fresh = h.accumulators.emplace_back();
  fresh.registers = d;
  fresh.count = count;
  fresh.pending = 0;
  std::memcpy(fresh.values, d, sizeof(float) * count);
  if (b.options->poison) std::memset(d, 0xff, sizeof(float) * count);
  return fresh;
}

// From here until the product is computed nobody may write this memory.
static void begin_reads(Block& b, int thread, const Operand& operand, int first, int rows, bool mark, Location at) {
  const size_t number = hopper_of(b, thread).issued();
  operand.for_each_chunk(first, rows, [&](uint32_t address, int, int) {
    check_shared_range(b, thread, address, 16, "wgmma operand", at);
    const uint32_t offset = address - kSharedBase;
    if (b.writes_in_flight[offset / 4] != 0) {
      fail(thread, at, "wgmma reads smem+%u while an asynchronous copy into it has not been waited for", offset);
    }
    if (b.race.enabled()) b.race.access(b, b.race.product(thread, number), offset, 16, false, at);
    if (mark) mark_reads(b, offset, 16, +1);
  });
}

void end_reads(Block& b, const Operand& operand, int rows) {
  operand.for_each_chunk(0, rows, [&](uint32_t address, int, int) { mark_reads(b, address - kSharedBase, 16, -1); });
}

static void check_issue(Block& b, const HopperThread& h, const WgmmaOp& op) {
  const int thread = b.current;
  if (b.threads < static_cast<uint32_t>(thread / 128 * 128 + 128)) {
    fail(thread, op.at, "wgmma needs a whole warpgroup; the block has %u threads", b.threads);
  }
  if (!h.wgmma_fenced) fail(thread, op.at, "wgmma without a wgmma_fence since its registers were last in use");
  if (Operand(op.desc_b, op.trans_b).base_offset() != 0) {
    fail(thread, op.at, "descriptor %016llx has a base offset: tiles must begin at multiples of 1024 bytes",
         static_cast<unsigned long long>(op.desc_b));
  }
}

void wgmma_fence(Location) { hopper_of(*block, block->current).wgmma_fenced = true; }

void wgmma(bool is_bfloat16, int n, float* d, const uint32_t* a, uint64_t desc_a, uint64_t desc_b, bool accumulate,
           bool trans_a, bool trans_b, Location at) {
  Block& b = *block;
  const int thread = b.current;
  HopperThread& h = hopper_of(b, thread);
  WgmmaOp op{d, {}, desc_a, desc_b, n, is_bfloat16, a != nullptr, accumulate, trans_a, trans_b, h.wgmma_group, at};
  check_issue(b, h, op);
  if (a != nullptr) std::memcpy(op.a, a, sizeof op.a);
  // Each warp reads its own sixteen rows of A and all of B. One lane stands for its warp.
  if (thread % 32 == 0) {
    const int warp = thread / 32 % 4;
    if (a == nullptr) begin_reads(b, thread, Operand(desc_a, trans_a), warp * kRowsOfWarp, kRowsOfWarp, true, at);
    begin_reads(b, thread, Operand(desc_b, trans_b), 0, n, warp == 0, at);
    if (warp == 0) b.statistics.wgmma++;
  }
  accumulator_for(b, h, d, n / 2).pending++;
  h.wgmma.push_back(op);
}

void wgmma_commit(Location) { hopper_of(*block, block->current).wgmma_group++; }

// How many of the thread's products belong to groups older than the newest `groups`.
static size_t products_due(const HopperThread& h, int groups) {
  size_t due = h.retired;
  while (due < h.issued() && h.product(due).group + static_cast<uint32_t>(groups) < h.wgmma_group) ++due;
  return due;
}

static void retire(Block& b, int thread, int groups) {
  HopperThread& h = hopper_of(b, thread);
  const size_t due = products_due(h, groups);
  for (; h.retired < due; ++h.retired) {
    const float* d = h.product(h.retired).d;
    for (size_t i = 0; i < h.accumulators.size(); ++i) {
      Accumulator& accumulator = h.accumulators[i];
      if (accumulator.registers != d) continue;
      if (--accumulator.pending == 0) {
        std::memcpy(accumulator.registers, accumulator.values, sizeof(float) * accumulator.count);
        if (i + 1 < h.accumulators.size()) accumulator = h.accumulators.back();
        h.accumulators.pop_back();
      }
      break;
    }
  }
  if (h.accumulators.empty()) {
    h.wgmma_fenced = false;
    h.dropped = h.retired;
    h.wgmma.clear();
  }
  b.race.acquire_products(thread, h.retired);
}

// The other warps of the warpgroup may still be on their way to issue.
static void await_issue(Block& b, int warpgroup, size_t due, Location at) {
  for (int thread = warpgroup * 128; thread < warpgroup * 128 + 128;) {
    if (hopper_of(b, thread).issued() >= due) {
      ++thread;
      continue;
    }
    if (b.ready_warps == 0 && b.hopper.in_flight.empty()) {
      fail(b.current, at, "deadlock: wgmma_wait for a product that thread %d never issues", thread);
    }
    yield();
  }
}

struct WaitArguments {
  int groups;
  Location at;
};

// The hardware may be late: a little, or until nobody else can do anything.
static void dawdle(Block& b) {
  constexpr uint32_t kPatience = 4096;  // others may be polling
  uint32_t turns = b.chance(4) ? kPatience : b.random() % 64;
  for (; turns != 0 && b.ready_warps != 0; --turns) yield();
}

// The instruction belongs to the warpgroup: a wait that only some of its warps pass has no defined behaviour.
static void check_same_wait(Block& b, int warp, const WaitArguments& mine) {
  Warpgroup& group = b.hopper.warpgroups[warp / 4];
  size_t& number = group.waits[warp % 4];
  if (number == group.first_wait + group.behind.size()) group.behind.push_back({mine.groups, mine.at});
  const WarpgroupWait& first = group.behind[number - group.first_wait];
  if (first.groups != mine.groups || first.at.line != mine.at.line || std::strcmp(first.at.file, mine.at.file) != 0) {
    fail(warp * 32, mine.at, "wgmma_wait where another warp of the warpgroup passes the one at %s:%d",
         base_name(first.at.file), first.at.line);
  }
  ++number;
  for (const size_t slowest = *std::min_element(group.waits, group.waits + 4); group.first_wait < slowest;) {
    group.behind.pop_front();
    ++group.first_wait;
  }
}

static void execute_wait(Block& b, int warp) {
  const auto& arguments = *static_cast<WaitArguments*>(b.warps[warp].arguments[0]);
  const int warpgroup = warp / 4;
  check_same_wait(b, warp, arguments);
  size_t due = 0;
  for (int lane = 0; lane < 32; ++lane) {
    const size_t mine = products_due(hopper_of(b, warp * 32 + lane), arguments.groups);
    if (lane != 0 && mine != due) {
      fail(warp * 32 + lane, arguments.at, "lanes of one warp wait for %zu and %zu products", due, mine);
    }
    due = mine;
  }
  await_issue(b, warpgroup, due, arguments.at);
  if (b.options->random_order && due > b.hopper.warpgroups[warpgroup].computed) dawdle(b);
  compute_products(b, warpgroup, due);
  for (int lane = 0; lane < 32; ++lane) retire(b, warp * 32 + lane, arguments.groups);
}

void wgmma_wait(int groups, Location at) {
  static const Collective op{"wgmma_wait", execute_wait};
  WaitArguments arguments{groups, at};
  meet(op, &arguments, at);
}

void setmaxnreg(int count, bool increase, Location at) {
  Block& b = *block;
  int& mine = hopper_of(b, b.current).registers;
  if (increase ? count < mine : count > mine) {
    fail(b.current, at, "setmaxnreg.%s to %d registers from %d", increase ? "inc" : "dec", count, mine);
  }
  while (b.hopper.free_registers < count - mine) {
    if (b.ready_warps == 0 && b.hopper.in_flight.empty()) {
      fail(b.current, at, "deadlock: setmaxnreg.inc to %d registers, and nobody gives any up", count);
    }
    yield();
  }
  b.hopper.free_registers -= count - mine;
  mine = count;
}

}  // namespace cuflash::emulator
