// Warp collectives: rendezvous of the 32 lanes, shuffles, votes, and 8x8 tiles between shared memory and registers.
#include <algorithm>

#include "emulator/runtime/state.h"

namespace cuflash::emulator {

void meet(const Collective& op, void* arguments, Location at) {
  Block& b = *block;
  const int thread = b.current, lane = thread % 32;
  Warp& warp = b.warps[thread / 32];
  if (warp.arrived == 0) {
    warp.op = &op;
    warp.at = at;
  } else if (warp.op != &op || warp.at.line != at.line) {
    fail(thread, at, "divergent warp collective: lane %d calls %s while %d lanes of its warp are in %s at %s:%d", lane,
         op.name, warp.arrived, warp.op->name, base_name(warp.at.file), warp.at.line);
  }
  warp.arguments[lane] = arguments;
  if (++warp.arrived < 32) {
    suspend(Wait::warp, op.name, at);
    return;
  }
  warp.arrived = 0;
  b.statistics.collectives++;
  op.execute(b, thread / 32);
  b.ready[thread / 32] |= ~(1u << lane);
  b.ready_warps |= 1u << thread / 32;
  if (b.options->random_order) yield();
}

static void execute_sync(Block& b, int warp) {
  if (!b.race.enabled()) return;
  std::vector<uint32_t> clock;
  for (int lane = 0; lane < 32; ++lane) b.race.release(clock, warp * 32 + lane);
  for (int lane = 0; lane < 32; ++lane) b.race.acquire(clock, warp * 32 + lane);
}

void sync_warp(Location at) {
  static const Collective op{"sync_warp", execute_sync};
  meet(op, nullptr, at);
}

struct Exchange {
  uint32_t value;
  int source;
  uint32_t result;
};

static void execute_shuffle(Block& b, int warp) {
  void** lanes = b.warps[warp].arguments;
  for (int lane = 0; lane < 32; ++lane) {
    auto* mine = static_cast<Exchange*>(lanes[lane]);
    mine->result = static_cast<Exchange*>(lanes[mine->source])->value;
  }
}

static void execute_ballot(Block& b, int warp) {
  void** lanes = b.warps[warp].arguments;
  uint32_t votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= static_cast<Exchange*>(lanes[lane])->value << lane;
  for (int lane = 0; lane < 32; ++lane) static_cast<Exchange*>(lanes[lane])->result = votes;
}

uint32_t shuffle(uint32_t value, int source_lane, Location at) {
  static const Collective op{"shuffle", execute_shuffle};
  Exchange exchange{value, source_lane & 31, 0};
  meet(op, &exchange, at);
  return exchange.result;
}

uint32_t ballot(bool predicate, Location at) {
  static const Collective op{"vote", execute_ballot};
  Exchange exchange{predicate ? 1u : 0u, 0, 0};
  meet(op, &exchange, at);
  return exchange.result;
}

struct Tiles {
  uint32_t address;
  uint32_t* registers;
  int count;
  Location at;
};
struct Tile {
  uint16_t element[8][8];  // [row, column]
};

static Tiles& tiles_of(Block& b, int warp, int lane) { return *static_cast<Tiles*>(b.warps[warp].arguments[lane]); }

// Eight rows of 16 bytes fit the 32 banks in one phase if their addresses differ modulo 128.
static void count_conflicts(Block& b, int warp, int tile) {
  int rows_in_bank[8] = {}, worst = 0;
  for (int row = 0; row < 8; ++row) {
    worst = std::max(worst, ++rows_in_bank[tiles_of(b, warp, tile * 8 + row).address / 16 % 8]);
  }
  b.statistics.matrix_phases++;
  b.statistics.matrix_conflicts += worst - 1;
}

static uint8_t* row_at(Block& b, int warp, int lane, Access access) {
  const Tiles& tiles = tiles_of(b, warp, lane);
  return shared_at(b, warp * 32 + lane, tiles.address, 16, access, tiles.at);
}

template <bool kTransposed>
static void execute_load(Block& b, int warp) {
  const int count = tiles_of(b, warp, 0).count;
  for (int t = 0; t < count; ++t) {
    Tile tile;
    count_conflicts(b, warp, t);
    for (int row = 0; row < 8; ++row) std::memcpy(tile.element[row], row_at(b, warp, t * 8 + row, Access::read), 16);
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4, column = lane % 4 * 2;
      const uint32_t lo = kTransposed ? tile.element[column][row] : tile.element[row][column];
      const uint32_t hi = kTransposed ? tile.element[column + 1][row] : tile.element[row][column + 1];
      tiles_of(b, warp, lane).registers[t] = lo | hi << 16;
    }
  }
}

template <bool kTransposed>
static void execute_store(Block& b, int warp) {
  const int count = tiles_of(b, warp, 0).count;
  for (int t = 0; t < count; ++t) {
    Tile tile;
    count_conflicts(b, warp, t);
    for (int lane = 0; lane < 32; ++lane) {
      const uint32_t pair = tiles_of(b, warp, lane).registers[t];
      const int row = lane / 4, column = lane % 4 * 2;
      (kTransposed ? tile.element[column][row] : tile.element[row][column]) = static_cast<uint16_t>(pair);
      (kTransposed ? tile.element[column + 1][row] : tile.element[row][column + 1]) = static_cast<uint16_t>(pair >> 16);
    }
    for (int row = 0; row < 8; ++row) std::memcpy(row_at(b, warp, t * 8 + row, Access::write), tile.element[row], 16);
  }
}

void ldmatrix(uint32_t* registers, int count, bool transposed, uint32_t address, Location at) {
  static const Collective plain{"ldmatrix", execute_load<false>}, turned{"ldmatrix.trans", execute_load<true>};
  Tiles tiles{address, registers, count, at};
  meet(transposed ? turned : plain, &tiles, at);
}

void stmatrix(uint32_t address, const uint32_t* registers, int count, bool transposed, Location at) {
  static const Collective plain{"stmatrix", execute_store<false>}, turned{"stmatrix.trans", execute_store<true>};
  Tiles tiles{address, const_cast<uint32_t*>(registers), count, at};
  meet(transposed ? turned : plain, &tiles, at);
}

}  // namespace cuflash::emulator
