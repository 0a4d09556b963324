// dk and dv of wide heads on Hopper: 64 keys a block, which stay in shared memory while the queries that see them
// stream past. The sums of 64 keys and 256 columns fill the registers of a warpgroup, so the two consumers divide the
// work by kind: one makes scores, probabilities and dv, the other d(probs), d(scores) and dk. The probabilities go from
// the first to the second through shared memory; it is their only tie, and each multiplies while the other does its
// pointwise part. There is no dq here (see backward_sm90_dq): every sum has a fixed order.
#pragma once
#include "kernels/backward_sm90_stream.cuh"

namespace cuflash {

template <class Config>
struct BackwardSm90DkdvLayout {
  static constexpr int kBlockQ = Config::kBlockQ, kBlockK = Config::kBlockK, kStages = Config::kStages;
  static constexpr int kHeadDim = Config::kHeadDim, kHeadDimV = Config::kHeadDimV;
  static_assert(kBlockK == tile::kWarpgroupRows, "both warpgroups work on the same 64 keys");

  using KTile = tile::SlabTile<kBlockK, kHeadDim>;
  using VTile = tile::SlabTile<kBlockK, kHeadDimV>;
  using QTile = tile::SlabTile<kBlockQ, kHeadDim>;
  using DOutTile = tile::SlabTile<kBlockQ, kHeadDimV>;
  static constexpr int kStatBytes = kBlockQ * 4;
  // Probabilities on their way to the other warpgroup, unrounded: as 16 bits, in two buffers, they would round d(scores)
  // twice (dk 1.2 times the error in float16), and save 1 to 2.5% of the time.
  static constexpr int kProbBytes = kBlockQ / 2 * tile::kWarpgroupThreads * 4;
  static constexpr uint32_t kK = 0;
  static constexpr uint32_t kV = kK + KTile::kBytes;
  static constexpr uint32_t kQ = kV + VTile::kBytes;
  static constexpr uint32_t kDOut = kQ + kStages * QTile::kBytes;
  static constexpr uint32_t kProbs = kDOut + kStages * DOutTile::kBytes;
  static constexpr uint32_t kLse = kProbs + kProbBytes;
  static constexpr uint32_t kDelta = kLse + kStages * kStatBytes;
  static constexpr uint32_t kBarriers = kDelta + kStages * kStatBytes;
  static constexpr uint32_t kBytes = kBarriers + (2 + 4 * kStages) * tile::kBarrierBytes;
  static_assert(kBytes == Config::kSharedBytes, "the planner reserves what the kernel uses");

  using QRing = tile::Ring<kStages, QTile::kBytes>;
  using DOutRing = tile::Ring<kStages, DOutTile::kBytes>;
  uint32_t smem;

  CUFLASH_DEVICE uint32_t keys_full() const { return smem + kBarriers; }
  CUFLASH_DEVICE uint32_t values_full() const { return keys_full() + tile::kBarrierBytes; }
  CUFLASH_DEVICE QRing q_ring() const { return {smem + kQ, values_full() + tile::kBarrierBytes}; }
  CUFLASH_DEVICE DOutRing d_out_ring() const { return {smem + kDOut, q_ring().barriers + QRing::kBarriersBytes}; }
  CUFLASH_DEVICE uint32_t lse(typename QRing::Position at) const { return smem + kLse + at.stage * kStatBytes; }
  CUFLASH_DEVICE uint32_t delta(typename QRing::Position at) const { return smem + kDelta + at.stage * kStatBytes; }
  CUFLASH_DEVICE uint32_t probs() const { return smem + kProbs; }
};

// Where a consumer stands in its steps.
template <class Config>
struct DkdvStep {
  using Position = tile::RingPosition<Config::kStages>;
  BackwardStep at_block;
  int total;
  int number = 0;
  Position at;

  CUFLASH_DEVICE Position next() const {
    Position after = at;
    after.advance();
    return after;
  }
  CUFLASH_DEVICE void advance(const BackwardSteps& steps) {
    ++number;
    at.advance();
    at_block.advance(steps);
  }
};

// Scores of a step, [64 keys, block_q].
template <class Config>
CUFLASH_DEVICE void start_dkdv_scores(float (&dots)[Config::kBlockQ / 2], const BackwardSm90DkdvLayout<Config>& layout,
                                      tile::RingPosition<Config::kStages> at) {
  using Layout = BackwardSm90DkdvLayout<Config>;
  layout.q_ring().wait_full(at);
  tile::start_scores<typename Config::Element, Config::kBlockK, Config::kBlockQ, Config::kHeadDim>(
      dots, layout.smem + Layout::kK, layout.q_ring().stage(at));
}

// d(probs) of a step, [64 keys, block_q].
template <class Config>
CUFLASH_DEVICE void start_dkdv_d_probs(float (&d_probs)[Config::kBlockQ / 2],
                                       const BackwardSm90DkdvLayout<Config>& layout,
                                       tile::RingPosition<Config::kStages> at) {
  using Layout = BackwardSm90DkdvLayout<Config>;
  layout.d_out_ring().wait_full(at);
  tile::start_scores<typename Config::Element, Config::kBlockK, Config::kBlockQ, Config::kHeadDimV>(
      d_probs, layout.smem + Layout::kV, layout.d_out_ring().stage(at));
}

// Probabilities and dv of a step and, unless it is the last, the scores of the next. What the other warpgroup gets is
// the derivative of the probability by the score.
template <class Config, bool kIsLast, class Params>
CUFLASH_DEVICE void dkdv_probs_step(const Params& params, const BackwardSm90DkdvLayout<Config>& layout,
                                    const typename Config::Score::Head& score_head, const FragmentPlace<true>& place,
                                    bool masked, const DkdvStep<Config>& step, float (&dots)[Config::kBlockQ / 2],
                                    float (&dv)[Config::kHeadDimV / 2]) {
  using Element = typename Config::Element;
  using Layout = BackwardSm90DkdvLayout<Config>;
  constexpr int kCount = Config::kBlockQ / 2, kThreads = 2 * tile::kWarpgroupThreads;
  const bool speaks = ptx::lane_index() == 0;
  uint32_t probs[kCount / 2];
  if constexpr (Config::Score::kPreScale) {
    exponentiate_scores<Config>(dots, probs, masked, params, score_head, place, ColumnStats(layout.lse(step.at)));
  } else {
    exponentiate<Config>(dots, masked, params, place, ColumnStats(layout.lse(step.at)));
    tile::pack_fragment<Element>(dots, probs);
  }
  ptx::sync_warp();  // every lane has read its lse
  if (speaks) layout.q_ring().release(step.at);
  if (step.number > 0) ptx::named_barrier_sync(kBarrierProbsEmpty, kThreads);
  tile::store_in_register_order(dots, layout.probs());
  ptx::named_barrier_arrive(kBarrierProbsFull, kThreads);

  layout.d_out_ring().wait_full(step.at);
  tile::start_output<Element, Config::kBlockQ, Config::kHeadDimV>(dv, probs, layout.d_out_ring().stage(step.at));
  if constexpr (!kIsLast) {
    start_dkdv_scores<Config>(dots, layout, step.next());
    ptx::wgmma_wait<1>();
    if (speaks) layout.d_out_ring().release(step.at);
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_touch(dv);
  if constexpr (!kIsLast) ptx::wgmma_touch(dots);
}

// d(scores) and dk of a step and, unless it is the last, d(probs) of the next.
template <class Config, bool kIsLast>
CUFLASH_DEVICE void dkdv_scores_step(const BackwardSm90DkdvLayout<Config>& layout, bool masked,
                                     const DkdvStep<Config>& step, float (&d_probs)[Config::kBlockQ / 2],
                                     float (&dk)[Config::kHeadDim / 2]) {
  using Element = typename Config::Element;
  using Layout = BackwardSm90DkdvLayout<Config>;
  constexpr int kCount = Config::kBlockQ / 2, kThreads = 2 * tile::kWarpgroupThreads;
  const bool speaks = ptx::lane_index() == 0;
  float derivatives[kCount];
  uint32_t d_scores[kCount / 2];
  ptx::named_barrier_sync(kBarrierProbsFull, kThreads);
  tile::load_in_register_order(derivatives, layout.probs());
  if (step.number + 1 < step.total) ptx::named_barrier_arrive(kBarrierProbsEmpty, kThreads);
  layout.q_ring().wait_full(step.at);  // queries for dk, and delta
  if (!Config::Mask::kUniform && masked) {
    differentiate<Element, true>(d_scores, derivatives, d_probs, ColumnStats(layout.delta(step.at)));
  } else {
    differentiate<Element, false>(d_scores, derivatives, d_probs, ColumnStats(layout.delta(step.at)));
  }
  tile::start_output<Element, Config::kBlockQ, Config::kHeadDim>(dk, d_scores, layout.q_ring().stage(step.at));
  if constexpr (!kIsLast) {
    start_dkdv_d_probs<Config>(d_probs, layout, step.next());
    ptx::wgmma_wait<1>();
    ptx::sync_warp();  // every lane has read its delta
    if (speaks) layout.q_ring().release(step.at);
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_touch(dk);
  if constexpr (!kIsLast) ptx::wgmma_touch(d_probs);
  if (!kIsLast && speaks) layout.d_out_ring().release(step.next());
}

// Both warpgroups wait for each other. They run different code, so each waits at a barrier of its own, one for the
// other's arrival and the other for the answer: synccheck takes one barrier at two instructions for divergence.
template <bool kMakesProbs>
CUFLASH_DEVICE void dkdv_meet() {
  constexpr int kThreads = 2 * tile::kWarpgroupThreads;
  if constexpr (kMakesProbs) {
    ptx::named_barrier_arrive(kBarrierConsumers, kThreads);
    ptx::named_barrier_sync(kBarrierMet, kThreads);
  } else {
    ptx::named_barrier_sync(kBarrierConsumers, kThreads);
    ptx::named_barrier_arrive(kBarrierMet, kThreads);
  }
}

// Before the step's sums, whose right operands are d_out for dv and queries for dk: each warpgroup clears what it is
// about to use, once the other has made its first product of it and before it could make another.
template <class Config, bool kMakesProbs>
CUFLASH_DEVICE void dkdv_clear_queries(const BackwardSm90DkdvLayout<Config>& layout, const DkdvStep<Config>& step) {
  using Layout = BackwardSm90DkdvLayout<Config>;
  using Element = typename Config::Element;
  constexpr int kThreads = tile::kWarpgroupThreads;
  const int thread = ptx::thread_index() % kThreads;
  dkdv_meet<kMakesProbs>();
  if constexpr (kMakesProbs) {
    layout.d_out_ring().wait_full(step.at);
    tile::clear_nonfinite<Element, Layout::DOutTile::kBytes, kThreads>(layout.d_out_ring().stage(step.at), thread);
  } else {
    tile::clear_nonfinite<Element, Layout::QTile::kBytes, kThreads>(layout.q_ring().stage(step.at), thread);
  }
  ptx::fence_proxy_async();  // wgmma reads what the threads have written
  dkdv_meet<kMakesProbs>();
}

// One step of one consumer: kMakesProbs tells which of the two.
template <class Config, bool kMakesProbs, bool kIsLast, class Params, int kCount>
CUFLASH_DEVICE void dkdv_step(const Params& params, const BackwardSm90DkdvLayout<Config>& layout,
                              const HeadBlock& work, const DkdvStep<Config>& step,
                              float (&products)[Config::kBlockQ / 2], float (&sums)[kCount]) {
  using Mask = typename Config::Mask;
  constexpr int kBlockQ = Config::kBlockQ, kBlockK = Config::kBlockK;
  const int row = step.at_block.block * kBlockQ, key = work.block * kBlockK;
  const bool masked = !all_visible<Mask>(params.mask, row, kBlockQ, key, kBlockK, params.seqlen_k);
  if (!Mask::kUniform && masked) {
    layout.q_ring().wait_full(step.at);  // both warpgroups find the same in lse
    if (has_nonfinite_queries<kBlockQ>(layout.lse(step.at))) dkdv_clear_queries<Config, kMakesProbs>(layout, step);
  }
  if constexpr (kMakesProbs) {
    const typename Config::Score::Head score_head = Config::Score::head(params.score, step.at_block.head, work.batch);
    const FragmentPlace<true> place{row + tile::fragment_col(), key + tile::fragment_row()};
    dkdv_probs_step<Config, kIsLast>(params, layout, score_head, place, masked, step, products, sums);
  } else {
    dkdv_scores_step<Config, kIsLast>(layout, masked, step, products, sums);
  }
}

// All steps of one consumer. Ends with the sums in global memory.
template <class Config, bool kMakesProbs, class Params>
CUFLASH_DEVICE void dkdv_consume(const Params& params, const BackwardSm90DkdvLayout<Config>& layout,
                                 const HeadBlock& work) {
  using Layout = BackwardSm90DkdvLayout<Config>;
  constexpr int kBlockQ = Config::kBlockQ, kBlockK = Config::kBlockK;
  constexpr int kCols = kMakesProbs ? Config::kHeadDimV : Config::kHeadDim;
  const BackwardSteps steps = backward_steps<Config>(params, work);
  DkdvStep<Config> step{.at_block = {steps.first_head, steps.first_block}, .total = steps.count()};
  float sums[kCols / 2], products[kBlockQ / 2];
#pragma unroll
  for (int i = 0; i < kCols / 2; ++i) sums[i] = 0.0f;

  ptx::mbarrier_wait(layout.keys_full(), 0);
  if (step.total > 0) {
    if constexpr (kMakesProbs) {
      start_dkdv_scores<Config>(products, layout, step.at);
    } else {
      ptx::mbarrier_wait(layout.values_full(), 0);
      start_dkdv_d_probs<Config>(products, layout, step.at);
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(products);
    if (!kMakesProbs && ptx::lane_index() == 0) layout.d_out_ring().release(step.at);
#pragma unroll 1
    for (; step.number + 1 < step.total; step.advance(steps)) {
      dkdv_step<Config, kMakesProbs, false>(params, layout, work, step, products, sums);
    }
    dkdv_step<Config, kMakesProbs, true>(params, layout, work, step, products, sums);
  }

  // Both warpgroups have read keys and values for the last time: their tiles become the way out.
  dkdv_meet<kMakesProbs>();
  const int row = ptx::thread_index() % 128 / 32 * 16;
  tile::store_to_tensor<typename Config::Element, kBlockK, kCols>(
      sums, kMakesProbs ? 1.0f : params.grad_scale, layout.smem + (kMakesProbs ? Layout::kV : Layout::kK), row,
      kMakesProbs ? &params.dv : &params.dk, work.block * kBlockK + row, work.head, work.batch);
  if (ptx::lane_index() == 0) ptx::bulk_wait_read<0>();  // shared memory outlives its readers
}

// Warp 0 copies in, warps 4 to 7 make probabilities and dv, warps 8 to 11 d(scores) and dk.
template <class Config, class Params>
CUFLASH_DEVICE void backward_sm90_dkdv(const Params& params) {
  using Layout = BackwardSm90DkdvLayout<Config>;
  const Layout layout{ptx::dynamic_shared()};
  const int warpgroup = ptx::warp_index() / 4;
  init_backward_barriers(layout);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<24>();
    if (ptx::thread_index() == 0) backward_produce<Config>(params, layout);
  } else {
    ptx::setmaxnreg_inc<240>();
    for_key_blocks<Config, false>(params, layout, [&](const HeadBlock& work, int) {
      if (warpgroup == 1) {
        dkdv_consume<Config, true>(params, layout, work);
      } else {
        dkdv_consume<Config, false>(params, layout, work);
      }
    });
  }
}

}  // namespace cuflash
