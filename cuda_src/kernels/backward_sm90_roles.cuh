// The Hopper backward kernel but for its consumers: where things lie in shared memory and who adds dq to global memory.
#pragma once
#include "kernels/backward_sm90_stream.cuh"

namespace cuflash {

template <class Config>
struct BackwardSm90Layout {
  static constexpr int kBlockQ = Config::kBlockQ, kBlockK = Config::kBlockK;
  static constexpr int kQueryStages = Config::kQueryStages, kDOutStages = Config::kDOutStages;
  static constexpr int kHeadDim = Config::kHeadDim, kHeadDimV = Config::kHeadDimV;
  static constexpr bool kAccumulateDq = Config::kAccumulateDq;
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
  static_assert(!kAccumulateDq || kHeadDim <= 128, "two warpgroups halve one or two slabs");
  static_assert(!kAccumulateDq || kDqByRows || kDqByCols || kWholeSlabs, "a transposed part is a slab of 64 columns");

  static constexpr int kStatBytes = kBlockQ * 4;
  static constexpr int kDScoreBuffers = kAccumulateDq ? 2 : 0;  // of this step and of the one before
  static constexpr uint32_t kK = 0;
  static constexpr uint32_t kV = kK + KTile::kBytes;
  static constexpr uint32_t kQ = kV + VTile::kBytes;
  static constexpr uint32_t kDOut = kQ + kQueryStages * QTile::kBytes;
  static constexpr uint32_t kDScores = kDOut + kDOutStages * DOutTile::kBytes;
  static constexpr uint32_t kDq = kDScores + kDScoreBuffers * DScoreTile::kBytes;
  static constexpr uint32_t kLse = kDq + (kAccumulateDq ? 2 * kDqPartFloats * 4 : 0);
  static constexpr uint32_t kDelta = kLse + kQueryStages * kStatBytes;
  static constexpr uint32_t kBarriers = kDelta + kQueryStages * kStatBytes;
  static constexpr uint32_t kBytes = kBarriers + (2 + 2 * kQueryStages + 2 * kDOutStages) * tile::kBarrierBytes;
  static_assert(kBytes == Config::kSharedBytes, "the planner reserves what the kernel uses");

  using QRing = tile::Ring<kQueryStages, QTile::kBytes>;
  using DOutRing = tile::Ring<kDOutStages, DOutTile::kBytes>;
  uint32_t smem;

  CUFLASH_DEVICE uint32_t keys_full() const { return smem + kBarriers; }
  CUFLASH_DEVICE uint32_t values_full() const { return keys_full() + tile::kBarrierBytes; }
  CUFLASH_DEVICE QRing q_ring() const { return {smem + kQ, values_full() + tile::kBarrierBytes}; }
  CUFLASH_DEVICE DOutRing d_out_ring() const { return {smem + kDOut, q_ring().barriers + QRing::kBarriersBytes}; }
  CUFLASH_DEVICE uint32_t lse(typename QRing::Position at) const { return smem + kLse + at.stage * kStatBytes; }
  CUFLASH_DEVICE uint32_t delta(typename QRing::Position at) const { return smem + kDelta + at.stage * kStatBytes; }
  CUFLASH_DEVICE uint32_t d_scores(int buffer) const { return smem + kDScores + buffer * DScoreTile::kBytes; }
  CUFLASH_DEVICE uint32_t dq_part(int warpgroup) const { return smem + kDq + warpgroup * kDqPartFloats * 4; }
};

// One warp for each consumer warpgroup: adds its part of dq to the accumulator while the next step runs.
template <class Config, class Params>
CUFLASH_DEVICE void backward_add_dq(const Params& params, const BackwardSm90Layout<Config>& layout,
                                    const HeadBlock& work, int warpgroup) {
  using Layout = BackwardSm90Layout<Config>;
  const BackwardSteps steps = backward_steps<Config>(params, work);
  constexpr int kThreads = tile::kWarpgroupThreads + 32;
  const bool speaks = ptx::lane_index() == 0;
  ptx::griddepcontrol_wait();  // the kernel before zeroed the accumulator
#pragma unroll 1
  for (int head = steps.first_head; head < steps.last_head; ++head) {
    const int64_t batch_head = static_cast<int64_t>(work.batch) * params.num_q_heads + head;
#pragma unroll 1
    for (int block = steps.first_block; block < steps.last_block; ++block) {
      ptx::named_barrier_arrive(kBarrierDqEmpty + warpgroup, kThreads);  // the last reduction has read its source
      ptx::named_barrier_sync(kBarrierDqFull + warpgroup, kThreads);     // the consumers have written the next
      if (speaks) {
        float* dq_gmem = params.dq_accumulator +
                         ((batch_head * params.num_q_blocks + block) * 2 + warpgroup) * Layout::kDqPartFloats;
        ptx::bulk_reduce_add_f32(dq_gmem, layout.dq_part(warpgroup), Layout::kDqPartFloats * 4);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
      }
      ptx::sync_warp();
    }
  }
  if (speaks) ptx::bulk_wait_read<0>();  // shared memory outlives its readers
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
