// dk, dv and, by way of a float32 accumulator, dq on Hopper: one block a tile of keys, which stays in shared memory while
// the queries that see it stream past. A producer warpgroup copies; two consumer warpgroups own 64 keys each.
//
// Scores and d(probs) are computed transposed, [keys, queries], so that probabilities and d(scores) are in registers just
// what the products for dv and dk take as their left operand. Only dq, which sums over keys, needs d(scores) of both
// warpgroups: they pass through shared memory and are the one meeting point of a step. dq of a step goes to shared memory
// and is added to global memory by a warp of the producer; without an accumulator (Config::kAccumulateDq false) all of
// that is gone, the warpgroups never meet, and every sum has a fixed order.
#pragma once
#include "kernels/backward_sm90_roles.cuh"

namespace cuflash {

// A consumer warpgroup: where it stands, and the sums that it carries from step to step.
template <class Config>
struct BackwardConsumer {
  const BackwardSm90Layout<Config>& layout;
  int warpgroup;
  FragmentPlace<true> place;  // of query 0

  // Own rows of a tile of keys or values.
  CUFLASH_DEVICE uint32_t rows(uint32_t tile_smem) const {
    return tile_smem + warpgroup * tile::kWarpgroupRows * tile::kSlabRowBytes;
  }

  // A key that some queries of a block do not see must not reach their dq, not even as zero times NaN. Those that do see
  // it have a NaN in lse: they lose nothing. After the scores of the first step have been made, before any dq.
  CUFLASH_DEVICE void clear_keys() const {
    using Tile = typename BackwardSm90Layout<Config>::KTile;
    constexpr int kBytes = tile::kWarpgroupRows * tile::kSlabRowBytes;
#pragma unroll 1
    for (int slab = 0; slab < Tile::kSlabs; ++slab) {
      tile::clear_nonfinite<typename Config::Element, kBytes, tile::kWarpgroupThreads>(
          rows(layout.smem + BackwardSm90Layout<Config>::kK + slab * Tile::kSlabBytes), ptx::thread_index() % 128);
    }
  }
};

// Hands this warpgroup's part of dq to the warp that adds it to global memory.
template <class Config, int kCount>
CUFLASH_DEVICE void hand_over_dq(const float (&dq)[kCount], const BackwardConsumer<Config>& self) {
  constexpr int kThreads = tile::kWarpgroupThreads + 32;
  ptx::named_barrier_sync(kBarrierDqEmpty + self.warpgroup, kThreads);
  tile::store_in_register_order(dq, self.layout.dq_part(self.warpgroup));
  ptx::fence_proxy_async();  // the reduction reads through the copy engine
  ptx::named_barrier_arrive(kBarrierDqFull + self.warpgroup, kThreads);
}

// The second half of a step: all products that use the probabilities and d(scores). With Config::kEarlyDv the product for
// dv is already under way.
template <class Config, int kStages>
CUFLASH_DEVICE void backward_accumulate(const BackwardConsumer<Config>& self, tile::RingPosition<kStages> at,
                                        const uint32_t (&probs)[Config::kBlockQ / 4],
                                        const uint32_t (&d_scores)[Config::kBlockQ / 4],
                                        float (&dk)[Config::kHeadDim / 2], float (&dv)[Config::kHeadDimV / 2]) {
  using Layout = BackwardSm90Layout<Config>;
  using Element = typename Config::Element;
  constexpr int kBlockQ = Config::kBlockQ;
  const Layout& layout = self.layout;
  const auto q_ring = layout.q_ring();
  const auto d_out_ring = layout.d_out_ring();
  const bool speaks = ptx::lane_index() == 0;
  if constexpr (!Config::kEarlyDv) {
    tile::start_output<Element, kBlockQ, Config::kHeadDimV>(dv, probs, d_out_ring.stage(at));
  }
  if constexpr (Config::kAccumulateDq) {
    float dq[Layout::kDqPartCols / 2];
    const int first_key = self.warpgroup * tile::kWarpgroupRows + ptx::thread_index() % 128 / 32 * 16;
    tile::store_transposed<kBlockQ, Config::kBlockK>(d_scores, layout.d_scores(at), first_key);
    ptx::fence_proxy_async();  // wgmma reads what the threads have written
    ptx::named_barrier_sync(kBarrierConsumers, 2 * tile::kWarpgroupThreads);  // d(scores) of all 128 keys are there
    start_dq(dq, layout, layout.d_scores(at), self.warpgroup);
    tile::start_output<Element, kBlockQ, Config::kHeadDim>(dk, d_scores, q_ring.stage(at));
    ptx::wgmma_wait<2>();
    if (speaks) d_out_ring.release(at);
    ptx::wgmma_wait<1>();
    ptx::wgmma_touch(dq);
    hand_over_dq(dq, self);
  } else {
    tile::start_output<Element, kBlockQ, Config::kHeadDim>(dk, d_scores, q_ring.stage(at));
    ptx::wgmma_wait<1>();
    if (speaks) d_out_ring.release(at);
    ptx::sync_warp();  // every lane has read its lse and delta; above, the meeting of the warpgroups says so
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_touch(dv);
  ptx::wgmma_touch(dk);
  if (speaks) q_ring.release(at);
}

// One block of queries of one head.
template <class Config, int kStages, class Params>
CUFLASH_DEVICE void backward_step(const Params& params, const BackwardConsumer<Config>& self,
                                  const typename Config::Score::Head& score_head, int first_row, bool masked,
                                  bool first, tile::RingPosition<kStages> at, float (&dk)[Config::kHeadDim / 2],
                                  float (&dv)[Config::kHeadDimV / 2]) {
  using Layout = BackwardSm90Layout<Config>;
  using Element = typename Config::Element;
  constexpr int kBlockQ = Config::kBlockQ, kBlockK = Config::kBlockK;
  constexpr bool kClearKeys = Config::kAccumulateDq && !Config::Mask::kUniform;
  const Layout& layout = self.layout;
  const FragmentPlace<true> place{self.place.first_q + first_row, self.place.first_k};
  float dots[kBlockQ / 2], d_probs[kBlockQ / 2];  // [64 keys, block_q]
  uint32_t probs[kBlockQ / 4], d_scores[kBlockQ / 4];

  layout.q_ring().wait_full(at);
  tile::start_scores<Element, kBlockK, kBlockQ, Config::kHeadDim>(dots, self.rows(layout.smem + Layout::kK),
                                                                  layout.q_ring().stage(at));
  layout.d_out_ring().wait_full(at);
  tile::start_scores<Element, kBlockK, kBlockQ, Config::kHeadDimV>(d_probs, self.rows(layout.smem + Layout::kV),
                                                                   layout.d_out_ring().stage(at));
  ptx::wgmma_wait<1>();
  ptx::wgmma_touch(dots);
  if constexpr (kClearKeys) {
    if (first) self.clear_keys();
  }
  // Where only padding is hidden, keys and values are zeros there and d(probs) are finite.
  constexpr bool kCanHide = !Config::Mask::kUniform;
  constexpr bool kPlain = !Config::Score::kPreScale;
  if constexpr (kPlain) {
    exponentiate<Config>(dots, masked, params, place, ColumnStats(layout.lse(at)));
    if constexpr (Config::kEarlyDv) tile::pack_fragment<Element>(dots, probs);
  } else {
    exponentiate_scores<Config>(dots, probs, masked, params, score_head, place, ColumnStats(layout.lse(at)));
  }
  if constexpr (Config::kEarlyDv) {
    // dv needs no d(probs): the tensor cores work on it while d(scores) are made.
    tile::start_output<Element, kBlockQ, Config::kHeadDimV>(dv, probs, layout.d_out_ring().stage(at));
    ptx::wgmma_wait<1>();
  } else {
    ptx::wgmma_wait<0>();
  }
  ptx::wgmma_touch(d_probs);
  if (kCanHide && masked) {
    differentiate<Element, true>(d_scores, dots, d_probs, ColumnStats(layout.delta(at)));
  } else {
    differentiate<Element, false>(d_scores, dots, d_probs, ColumnStats(layout.delta(at)));
  }
  // The derivatives of the plain score are the probabilities. Packed only here, they do not live beside d(probs).
  if constexpr (kPlain && !Config::kEarlyDv) tile::pack_fragment<Element>(dots, probs);
  backward_accumulate(self, at, probs, d_scores, dk, dv);
}

template <class Config, class Params>
CUFLASH_DEVICE void backward_consume(const Params& params, const BackwardSm90Layout<Config>& layout,
                                     const HeadBlock& work, int warpgroup) {
  using Layout = BackwardSm90Layout<Config>;
  using Element = typename Config::Element;
  constexpr int kBlockQ = Config::kBlockQ, kBlockK = Config::kBlockK;
  const BackwardSteps steps = backward_steps<Config>(params, work);
  const int first_key = work.block * kBlockK;
  const int own_key = warpgroup * tile::kWarpgroupRows;
  const BackwardConsumer<Config> self{layout, warpgroup,
                                      {tile::fragment_col(), first_key + own_key + tile::fragment_row()}};
  float dk[Config::kHeadDim / 2], dv[Config::kHeadDimV / 2];
#pragma unroll
  for (int i = 0; i < Config::kHeadDim / 2; ++i) dk[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < Config::kHeadDimV / 2; ++i) dv[i] = 0.0f;

  typename Layout::Position at;
  bool first = true;
  ptx::mbarrier_wait(layout.keys_full(), 0);
#pragma unroll 1
  for (int head = steps.first_head; head < steps.last_head; ++head) {
    const typename Config::Score::Head score_head = Config::Score::head(params.score, head, work.batch);
#pragma unroll 1
    for (int block = steps.first_block; block < steps.last_block; ++block, at.advance()) {
      const bool masked = !all_visible<typename Config::Mask>(params.mask, block * kBlockQ, kBlockQ, first_key, kBlockK,
                                                              params.seqlen_k);
      backward_step<Config>(params, self, score_head, block * kBlockQ, masked, first, at, dk, dv);
      first = false;
    }
  }

  // Both warpgroups have read the keys for the last time: their tiles become the way out.
  ptx::named_barrier_sync(kBarrierConsumers, 2 * tile::kWarpgroupThreads);
  const int row = own_key + ptx::thread_index() % 128 / 32 * 16;
  tile::store_to_tensor<Element, kBlockK, Config::kHeadDimV>(dv, 1.0f, layout.smem + Layout::kV, row, &params.dv,
                                                             first_key + row, work.head, work.batch);
  tile::store_to_tensor<Element, kBlockK, Config::kHeadDim>(dk, params.grad_scale, layout.smem + Layout::kK, row,
                                                            &params.dk, first_key + row, work.head, work.batch);
  if (ptx::lane_index() == 0) ptx::bulk_wait<0>();  // shared memory outlives its readers
}

// Warps 0 to 3 copy in (0) and add dq (1, 2); the others multiply.
template <class Config, class Params>
CUFLASH_DEVICE void backward_sm90(const Params& params) {
  using Layout = BackwardSm90Layout<Config>;
  const Layout layout{ptx::dynamic_shared()};
  const int warp = ptx::warp_index();
  init_backward_barriers(layout);
  // Each role finds its work for itself: nothing is carried over the change of registers.
  if (warp < 4) {
    ptx::setmaxnreg_dec<24>();
    if (ptx::thread_index() == 0) {
      backward_produce<Config>(params, layout, key_block_of(params));
    } else if (Config::kAccumulateDq && (warp == 1 || warp == 2)) {
      backward_add_dq(params, layout, key_block_of(params), warp - 1);
    }
  } else {
    ptx::setmaxnreg_inc<240>();
    backward_consume(params, layout, key_block_of(params), warp / 4 - 1);
  }
}

}  // namespace cuflash
