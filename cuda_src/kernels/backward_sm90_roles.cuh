// The Hopper backward kernel but for its consumers: where things lie in shared memory, which steps a block takes, who
// copies in and who adds dq to global memory.
#pragma once
#include "kernels/backward_sm90_parts.cuh"

namespace cuflash {

template <class Config>
struct BackwardSm90Layout {
  static constexpr int kBlockQ = Config::kBlockQ, kBlockK = Config::kBlockK, kStages = Config::kStages;
  static constexpr int kHeadDim = Config::kHeadDim, kHeadDimV = Config::kHeadDimV;
  static constexpr bool kAccumulateDq = Config::kAccumulateDq;
  static_assert(kBlockK == 2 * tile::kWarpgroupRows, "two warpgroups of 64 keys");
  static_assert(kBlockQ % 16 == 0 && kBlockQ <= 128, "d(scores) are stored 16 queries at a time");
  static_assert(!kAccumulateDq || kStages == 2, "the buffers of d(scores) follow the stages");

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
  static constexpr int kDScoreStages = kAccumulateDq ? 2 : 0;  // two, so that one barrier a step is enough
  static constexpr uint32_t kK = 0;
  static constexpr uint32_t kV = kK + KTile::kBytes;
  static constexpr uint32_t kQ = kV + VTile::kBytes;
  static constexpr uint32_t kDOut = kQ + kStages * QTile::kBytes;
  static constexpr uint32_t kDScores = kDOut + kStages * DOutTile::kBytes;
  static constexpr uint32_t kDq = kDScores + kDScoreStages * DScoreTile::kBytes;
  static constexpr uint32_t kLse = kDq + (kAccumulateDq ? 2 * kDqPartFloats * 4 : 0);
  static constexpr uint32_t kDelta = kLse + kStages * kStatBytes;
  static constexpr uint32_t kBarriers = kDelta + kStages * kStatBytes;
  static constexpr uint32_t kBytes = kBarriers + (1 + 4 * kStages) * tile::kBarrierBytes;
  static_assert(kBytes == Config::kSharedBytes, "the planner reserves what the kernel uses");

  using QRing = tile::Ring<kStages, QTile::kBytes>;
  using DOutRing = tile::Ring<kStages, DOutTile::kBytes>;
  using Position = tile::RingPosition<kStages>;
  uint32_t smem;

  CUFLASH_DEVICE uint32_t keys_full() const { return smem + kBarriers; }
  CUFLASH_DEVICE QRing q_ring() const { return {smem + kQ, keys_full() + tile::kBarrierBytes}; }
  CUFLASH_DEVICE DOutRing d_out_ring() const { return {smem + kDOut, q_ring().barriers + QRing::kBarriersBytes}; }
  CUFLASH_DEVICE uint32_t lse(Position at) const { return smem + kLse + at.stage * kStatBytes; }
  CUFLASH_DEVICE uint32_t delta(Position at) const { return smem + kDelta + at.stage * kStatBytes; }
  CUFLASH_DEVICE uint32_t d_scores(Position at) const { return smem + kDScores + at.stage * DScoreTile::kBytes; }
  CUFLASH_DEVICE uint32_t dq_part(int warpgroup) const { return smem + kDq + warpgroup * kDqPartFloats * 4; }
};

template <class Params>
CUFLASH_DEVICE HeadBlock key_block_of(const Params& params) {
  return head_block_of(ptx::block_index(), params.num_k_blocks, params.num_kv_heads, params.batch,
                       params.heads_per_section);
}

// The steps of one block of keys: every query head of its group, every block of queries that sees any of the keys.
struct BackwardSteps {
  int first_head, last_head;    // query heads
  int first_block, last_block;  // blocks of queries
};

template <class Config, class Params>
CUFLASH_DEVICE BackwardSteps backward_steps(const Params& params, const HeadBlock& work, int block_k) {
  const int first_key = work.block * block_k;
  const int last_key = tile::smaller(first_key + block_k, params.seqlen_k) - 1;
  const Range rows = Config::Mask::query_range(params.mask, first_key, last_key, params.seqlen_q);
  const int group = params.num_q_heads / params.num_kv_heads;
  const int first_block = rows.begin / Config::kBlockQ;
  const int last_block = rows.is_empty() ? first_block : (rows.end + Config::kBlockQ - 1) / Config::kBlockQ;
  return {work.head * group, work.head * group + group, first_block, last_block};
}

// One thread: keys and values once, then queries and d_out block by block.
template <class Config, class Params>
CUFLASH_DEVICE void backward_produce(const Params& params, const BackwardSm90Layout<Config>& layout,
                                     const HeadBlock& work) {
  using Layout = BackwardSm90Layout<Config>;
  const BackwardSteps steps = backward_steps<Config>(params, work, Config::kBlockK);
  const int first_key = work.block * Config::kBlockK;
  ptx::mbarrier_arrive_expect_tx(layout.keys_full(), Layout::KTile::kBytes + Layout::VTile::kBytes);
  tile::load_slabs<Config::kBlockK, Config::kHeadDim>(layout.smem + Layout::kK, &params.k, layout.keys_full(), first_key,
                                                      work.head, work.batch);
  tile::load_slabs<Config::kBlockK, Config::kHeadDimV>(layout.smem + Layout::kV, &params.v, layout.keys_full(),
                                                       first_key, work.head, work.batch);
  ptx::griddepcontrol_wait();  // lse, delta and the zeroed accumulator come from the kernel before
  typename Layout::Position at;
  const auto q_ring = layout.q_ring();
  const auto d_out_ring = layout.d_out_ring();
#pragma unroll 1
  for (int head = steps.first_head; head < steps.last_head; ++head) {
    int64_t stat = (static_cast<int64_t>(work.batch) * params.num_q_heads + head) * params.stat_rows +
                   steps.first_block * Config::kBlockQ;
    const int last_row = steps.last_block * Config::kBlockQ;
#pragma unroll 1
    for (int row = steps.first_block * Config::kBlockQ; row < last_row; row += Config::kBlockQ, at.advance()) {
      q_ring.wait_empty(at);
      ptx::mbarrier_arrive_expect_tx(q_ring.full(at), Layout::QTile::kBytes + 2 * Layout::kStatBytes);
      tile::load_slabs<Config::kBlockQ, Config::kHeadDim>(q_ring.stage(at), &params.q, q_ring.full(at), row, head,
                                                          work.batch);
      ptx::bulk_load(layout.lse(at), params.lse_log2 + stat, Layout::kStatBytes, q_ring.full(at));
      ptx::bulk_load(layout.delta(at), params.delta + stat, Layout::kStatBytes, q_ring.full(at));
      stat += Config::kBlockQ;
      d_out_ring.wait_empty(at);
      ptx::mbarrier_arrive_expect_tx(d_out_ring.full(at), Layout::DOutTile::kBytes);
      tile::load_slabs<Config::kBlockQ, Config::kHeadDimV>(d_out_ring.stage(at), &params.d_out, d_out_ring.full(at), row,
                                                           head, work.batch);
    }
  }
}

// One warp for each consumer warpgroup: adds its part of dq to the accumulator while the next step runs.
template <class Config, class Params>
CUFLASH_DEVICE void backward_add_dq(const Params& params, const BackwardSm90Layout<Config>& layout,
                                    const HeadBlock& work, int warpgroup) {
  using Layout = BackwardSm90Layout<Config>;
  const BackwardSteps steps = backward_steps<Config>(params, work, Config::kBlockK);
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
  if (speaks) ptx::bulk_wait<0>();  // shared memory outlives its readers
}

// Starts dq = d_scores k for this warpgroup's part; d_scores of both warpgroups are in shared memory.
template <class Config, int kCount>
CUFLASH_DEVICE void start_dq(float (&dq)[kCount], const BackwardSm90Layout<Config>& layout, uint32_t d_scores_smem,
                             int warpgroup) {
  using Layout = BackwardSm90Layout<Config>;
  using Element = typename Config::Element;
  constexpr int kBlockQ = Config::kBlockQ, kBlockK = Config::kBlockK;
  const uint32_t k_smem = layout.smem + Layout::kK;
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
