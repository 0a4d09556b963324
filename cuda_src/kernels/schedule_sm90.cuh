// Which tile of queries comes next, and how the producer thread tells the consumers: an order of tiles, and a board of
// slots in shared memory through which work goes out and verdicts come back.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "tile/pipeline.cuh"

namespace cuflash {

enum class Schedule {
  kOneTile,  // one tile a block: the hardware hands out blocks in order
  kStatic,   // as many blocks as multiprocessors, tiles dealt out in turn
  kDynamic,  // the same blocks, each takes the next free tile: balances tiles of different length
};

// One tile of queries to work on. 16 bytes, as it lies in shared memory.
struct alignas(16) WorkItem {
  int32_t q_block, head, batch;
  int16_t kind;   // one of the values below
  int16_t split;  // which part of the keys
};
inline constexpr int16_t kWorkEnd = 0, kWorkTile = 1, kWorkRedo = 2;

// Tiles stand in sections of heads (their keys and values stay in the L2 cache), inside a section the last block of
// queries first: under a causal mask it is the longest, and long tiles early leave short ones to fill the end.
template <class Params>
CUFLASH_DEVICE WorkItem work_of_tile(const Params& params, int tile) {
  const int split = tile % params.num_splits;
  tile /= params.num_splits;
  const int num_heads = params.num_tiles / (params.num_q_blocks * params.num_splits);
  const int section_tiles = params.section_heads * params.num_q_blocks;
  const int first_head = tile / section_tiles * params.section_heads;
  const int within = tile % section_tiles;
  const int heads = ptx::min(params.section_heads, num_heads - first_head);  // the last section may be smaller
  const int head = first_head + within % heads;
  return {params.num_q_blocks - 1 - within / heads, head % params.tile_heads, head / params.tile_heads, kWorkTile,
          static_cast<int16_t>(split)};
}

// The ticket for the next tile, drawn while the current one is still being loaded: a trip to the counter takes as long
// as loading a block. Only drawn_tile looks at it, so that nothing waits for it in between.
template <Schedule kSchedule, class Params>
CUFLASH_DEVICE uint32_t draw_ticket(const Params& params) {
  if constexpr (kSchedule == Schedule::kDynamic) return ptx::atomic_add(params.counter, 1u);
  return 0;
}

// The tile after this one; num_tiles or more when there is none. The grid has at most num_tiles blocks.
template <Schedule kSchedule, class Params>
CUFLASH_DEVICE int drawn_tile(const Params& params, int tile, uint32_t ticket) {
  const int blocks = ptx::grid_size();
  if constexpr (kSchedule == Schedule::kOneTile) return params.num_tiles;
  if constexpr (kSchedule == Schedule::kStatic) return tile + blocks;
  // Every block began with the tile of its own index, so num_tiles tickets are drawn in all, the last of each block in
  // vain. Whoever draws the last one puts the counter back to zero for the next launch.
  if (ticket == static_cast<uint32_t>(params.num_tiles) - 1) ptx::store_global(params.counter, 0u);
  return blocks + static_cast<int>(ticket);
}

// Slots in a ring; tiles are numbered as they are posted. A slot is used again only when every consumer warp has
// written its verdict on the tile before, so no warp can fall behind by a round and at most kSlots tiles wait for
// judgement.
template <int kWarps>
struct WorkBoard {
  static constexpr uint32_t kSlots = 4;
  static constexpr int kItemBytes = sizeof(WorkItem);
  static constexpr int kVerdictBytes = kWarps * 4;
  static constexpr int kBytes = kSlots * (kItemBytes + kVerdictBytes + 2 * tile::kBarrierBytes);

  uint32_t base;

  CUFLASH_DEVICE uint32_t item(uint32_t number) const { return base + number % kSlots * kItemBytes; }
  CUFLASH_DEVICE uint32_t verdict(uint32_t number, int warp) const {
    return base + kSlots * kItemBytes + number % kSlots * kVerdictBytes + warp * 4;
  }
  CUFLASH_DEVICE uint32_t posted(uint32_t number) const {
    return base + kSlots * (kItemBytes + kVerdictBytes) + number % kSlots * tile::kBarrierBytes;
  }
  CUFLASH_DEVICE uint32_t done(uint32_t number) const { return posted(number) + kSlots * tile::kBarrierBytes; }
  CUFLASH_DEVICE static uint32_t parity(uint32_t number) { return number / kSlots % 2; }

  CUFLASH_DEVICE void init() const {
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      ptx::mbarrier_init(posted(slot), 1);
      ptx::mbarrier_init(done(slot), kWarps);
    }
  }

  // Producer side.
  CUFLASH_DEVICE void post(uint32_t number, const WorkItem& work) const {
    ptx::store_shared(item(number), work);
    ptx::mbarrier_arrive(posted(number));
  }
  // Waits until the tile is finished; whether a warp could not vouch for it.
  CUFLASH_DEVICE bool was_refused(uint32_t number) const {
    ptx::mbarrier_wait(done(number), parity(number));
    uint32_t refusals = 0;
    for (int warp = 0; warp < kWarps; ++warp) refusals |= ptx::load_shared<uint32_t>(verdict(number, warp));
    return refusals != 0;
  }
  CUFLASH_DEVICE WorkItem recall(uint32_t number) const { return ptx::load_shared<WorkItem>(item(number)); }

  // Consumer side.
  CUFLASH_DEVICE WorkItem read(uint32_t number) const {
    ptx::mbarrier_wait(posted(number), parity(number));
    return ptx::load_shared<WorkItem>(item(number));
  }
  // By one lane of each warp, after the whole warp has finished the tile.
  CUFLASH_DEVICE void judge(uint32_t number, int warp, bool refused) const {
    ptx::store_shared(verdict(number, warp), static_cast<uint32_t>(refused));
    ptx::mbarrier_arrive(done(number));
  }
};

}  // namespace cuflash
