// The Hopper backward kernel but for its consumers: where things lie in shared memory and who adds dq to global memory.
#pragma once
#include "kernels/backward_sm90_stream.cuh"

namespace cuflash {

template <class Config>
struct BackwardSm90Layout {
  static constexpr int kBlockQ = Config::kBlockQ, kBlockK = Config::kBlockK;
  static constexpr int kQueryStages = Config::kQueryStages, kDOutStages = Config::kDOutStages;
  static constexpr int kHeadDim = Config::kHeadDim, kHeadDimV = Config::kHeadDimV;
  static_assert(kBlockK == 2 * tile::kWarpgroupRows, "two warpgroups of 64 keys");
  static_assert(kBlockQ % 16 == 0 && kBlockQ <= 128, "d(scores) are stored 16 queries at a time");

  using KTile = tile::SlabTile<kBlockK, kHeadDim>;
  using VTile = tile::SlabTile<kBlockK, kHeadDimV>;
  using QTile = tile::SlabTile<kBlockQ, kHeadDim>;
  using DOutTile = tile::SlabTile<kBlockQ, kHeadDimV>;
  using DScoreTile = tile::SlabTile<kBlockQ, kBlockK>;

  // How the warpgroups share dq: 64 rows each, half of the columns each, or half of the columns of its transpose, which
  // takes any number of rows.
  static constexpr bool kDqByRows = kBlockQ == 128;
  static constexpr bool kDqByCols = kBlockQ == 64;
  static constexpr bool kWholeSlabs = KTile::kSlabs == 2;  // a half is a slab; otherwise it is half a slab
  static constexpr int kDqCols = kWholeSlabs && !kDqByRows ? 2 * tile::kSlabCols : kHeadDim;
  static constexpr int kDqPartCols = kDqByRows ? kDqCols : kDqByCols ? kDqCols / 2 : kBlockQ;  // of one product
  static constexpr int kDqPartFloats = kBlockQ * kDqCols / 2;
  static constexpr int kDqPartOffset = kWholeSlabs ? KTile::kSlabBytes : tile::kSlabRowBytes / 2;  // in the keys
  static_assert(!Config::kOrderedDq || Config::kPersistent, "whoever waits for a tile must know that somebody has it");
  static_assert(kHeadDim <= 128, "two warpgroups halve one or two slabs");
  static_assert(kDqByRows || kDqByCols || kWholeSlabs, "a transposed part is a slab of 64 columns");

  static constexpr int kStatBytes = kBlockQ * 4;
  static constexpr int kDScoreBuffers = 2;  // of this step and of the one before
  static constexpr uint32_t kK = 0;
  static constexpr uint32_t kV = kK + KTile::kBytes;
  static constexpr uint32_t kQ = kV + VTile::kBytes;
  static constexpr uint32_t kDOut = kQ + kQueryStages * QTile::kBytes;
  static constexpr uint32_t kDScores = kDOut + kDOutStages * DOutTile::kBytes;
  static constexpr uint32_t kDq = kDScores + kDScoreBuffers * DScoreTile::kBytes;
  static constexpr uint32_t kLse = kDq + 2 * kDqPartFloats * 4;
  static constexpr uint32_t kDelta = kLse + kQueryStages * kStatBytes;
  static constexpr uint32_t kBarriers = kDelta + kQueryStages * kStatBytes;
  static constexpr uint32_t kBoard = kBarriers + (3 + 2 * kQueryStages + 2 * kDOutStages) * tile::kBarrierBytes;
  static constexpr uint32_t kBytes = kBoard + (Config::kPersistent ? TicketBoard::kBytes : 0);
  static_assert(kBytes == Config::kSharedBytes, "the planner reserves what the kernel uses");

  using QRing = tile::Ring<kQueryStages, QTile::kBytes>;
  using DOutRing = tile::Ring<kDOutStages, DOutTile::kBytes>;
  uint32_t smem;

  CUFLASH_DEVICE uint32_t keys_full() const { return smem + kBarriers; }
  CUFLASH_DEVICE uint32_t values_full() const { return keys_full() + tile::kBarrierBytes; }
  CUFLASH_DEVICE TicketBoard board() const { return {smem + kBoard}; }
  CUFLASH_DEVICE uint32_t keys_empty() const { return values_full() + tile::kBarrierBytes; }
  CUFLASH_DEVICE QRing q_ring() const { return {smem + kQ, keys_empty() + tile::kBarrierBytes}; }
  CUFLASH_DEVICE DOutRing d_out_ring() const { return {smem + kDOut, q_ring().barriers + QRing::kBarriersBytes}; }
  CUFLASH_DEVICE uint32_t lse(typename QRing::Position at) const { return smem + kLse + at.stage * kStatBytes; }
  CUFLASH_DEVICE uint32_t delta(typename QRing::Position at) const { return smem + kDelta + at.stage * kStatBytes; }
  CUFLASH_DEVICE uint32_t d_scores(int buffer) const { return smem + kDScores + buffer * DScoreTile::kBytes; }
  CUFLASH_DEVICE uint32_t dq_part(int warpgroup) const { return smem + kDq + warpgroup * kDqPartFloats * 4; }
};

// A warpgroup's part of dq of one block of queries, on its way to global memory. One thread does it all. In a fixed
// order blocks of keys add theirs one after the other, and how many have is counted there.
template <class Config>
struct DqPart {
  static constexpr int kFloats = BackwardSm90Layout<Config>::kDqPartFloats;
  int index = -1;  // in the accumulator; -1 before the first
  uint32_t turn;   // of this block of keys

  template <class Params>
  CUFLASH_DEVICE void find(const Params& params, int batch_head, int block, int key_block, int warpgroup) {
    index = (batch_head * params.num_q_blocks + block) * 2 + warpgroup;
    if constexpr (Config::kOrderedDq) {
      const int first_row = block * Config::kBlockQ;
      const int last_row = tile::smaller(first_row + Config::kBlockQ, params.seqlen_q) - 1;
      const Range keys = Config::Mask::key_range(params.mask, first_row, last_row, params.seqlen_k);
      turn = key_block - keys.begin / Config::kBlockK;
    }
  }

  // The blocks of keys before this one have been drawn by blocks that run, and never wait for this one. The first does
  // not add but writes, so that nobody has to clear.
  template <class Params>
  CUFLASH_DEVICE void await_turn(const Params& params) const {
    if (!Config::kOrderedDq || turn == 0) return;
    while (ptx::load_acquire(params.dq_turns + index) != turn) {
    }
    ptx::fence_proxy_async_global();  // the sums so far, before this addition
  }
  template <class Params>
  CUFLASH_DEVICE void add(const Params& params, uint32_t part_smem) const {
    float* sums_gmem = params.dq_accumulator + static_cast<int64_t>(index) * kFloats;
    if (Config::kOrderedDq && turn == 0) {
      ptx::bulk_store(sums_gmem, part_smem, kFloats * 4);
    } else {
      ptx::bulk_reduce_add_f32(sums_gmem, part_smem, kFloats * 4);
    }
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();  // the part may be overwritten
  }

  // Later: what was added has arrived, and the next block of keys may add.
  template <class Params>
  CUFLASH_DEVICE void pass_turn(const Params& params) {
    if (!Config::kOrderedDq || index < 0) return;
    ptx::bulk_wait<0>();
    ptx::store_release(params.dq_turns + index, turn + 1);
    index = -1;
  }
};

// One warp for each consumer warpgroup: adds its part of dq to the accumulator while the next step runs.
template <class Config, class Params>
CUFLASH_DEVICE void backward_add_dq(const Params& params, const BackwardSm90Layout<Config>& layout,
                                    const HeadBlock& work, int warpgroup) {
  const BackwardSteps steps = backward_steps<Config>(params, work);
  constexpr int kThreads = tile::kWarpgroupThreads + 32;
  const bool speaks = ptx::lane_index() == 0;
  DqPart<Config> part;
  BackwardStep step{steps.first_head, steps.first_block};
#pragma unroll 1
  for (int left = steps.count(); left > 0; --left, step.advance(steps)) {
    ptx::named_barrier_arrive(kBarrierDqEmpty + warpgroup, kThreads);  // the last reduction has read its source
    if (speaks) {  // all of it while the consumers multiply
      part.pass_turn(params);
      part.find(params, work.batch * params.num_q_heads + step.head, step.block, work.block, warpgroup);
      part.await_turn(params);
    }
    ptx::sync_warp();
    ptx::named_barrier_sync(kBarrierDqFull + warpgroup, kThreads);  // the consumers have written the next
    if (speaks) part.add(params, layout.dq_part(warpgroup));
    ptx::sync_warp();
  }
  if (speaks) part.pass_turn(params);
}

// Starts dq = d_scores k for this warpgroup's part; keys and d_scores of both warpgroups are in shared memory.
template <class Config, int kCount>
CUFLASH_DEVICE void start_dq(float (&dq)[kCount], uint32_t k_smem, uint32_t d_scores_smem, int warpgroup) {
  using Layout = BackwardSm90Layout<Config>;
  using Element = typename Config::Element;
  constexpr int kBlockQ = Config::kBlockQ, kBlockK = Config::kBlockK;
  const uint32_t k_part_smem = k_smem + warpgroup * Layout::kDqPartOffset;
  if constexpr (Layout::kDqByRows) {
    const uint32_t rows_smem = d_scores_smem + warpgroup * tile::kWarpgroupRows * tile::kSlabRowBytes;
    tile::start_rows_times_keys<Element, kBlockQ, kBlockK, Layout::kDqPartCols>(dq, rows_smem, k_smem);
  } else if constexpr (Layout::kDqByCols) {
    tile::start_rows_times_keys<Element, kBlockQ, kBlockK, Layout::kDqPartCols>(dq, d_scores_smem, k_part_smem);
  } else {
    tile::start_keys_times_rows<Element, kBlockQ, kBlockK>(dq, k_part_smem, d_scores_smem);
  }
}

}  // namespace cuflash
