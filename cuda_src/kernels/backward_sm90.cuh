// dk, dv and, by way of a float32 accumulator, dq on Hopper: one block a tile of keys, which stays in shared memory while
// the queries that see it stream past. A producer warpgroup copies; two consumer warpgroups own 64 keys each.
//
// Scores and d(probs) are computed transposed, [keys, queries], so that probabilities and d(scores) are in registers just
// what the products for dv and dk take as their left operand. Only dq, which sums over keys, needs d(scores) of both
// warpgroups: they pass through shared memory. dq of a step goes to shared memory too and is added to global memory by a
// warp of the producer; without an accumulator (Config::kAccumulateDq false) all of that is gone and every sum has a
// fixed order.
//
// The warpgroups take turns at starting products, so that one multiplies while the other does its pointwise part; left
// alone they fall into step, and the tensor cores idle through every exponential. A step takes two turns: scores and
// d(probs); then, with probabilities and d(scores) ready, dv, dk and dq. Warpgroup 1 is a turn behind:
//   0: scores(n)  sums(n)      scores(n+1)  sums(n+1)
//   1:            scores(n-1)* sums(n-1)*   scores(n) ...      (* as n = 0 has no step before it, an empty turn)
// When warpgroup 0 has its turn for sums(n), d(scores) of warpgroup 1 exist up to step n - 1: its dq is one step late.
// The turns order everything that the warpgroups share: whoever has a turn sees what the other did before its last one.
#pragma once
#include "kernels/backward_sm90_roles.cuh"

namespace cuflash {

// A consumer warpgroup and where it stands.
template <class Config>
struct BackwardConsumer {
  using Layout = BackwardSm90Layout<Config>;
  static constexpr int kBoth = 2 * tile::kWarpgroupThreads;
  const Layout& layout;
  int warpgroup;
  int first_k;  // key of this thread's first accumulator
  typename Layout::Position at;
  int step = 0;

  CUFLASH_DEVICE void take_turn() const { ptx::named_barrier_sync(kBarrierTurn + warpgroup, kBoth); }
  CUFLASH_DEVICE void pass_turn() const { ptx::named_barrier_arrive(kBarrierTurn + 1 - warpgroup, kBoth); }

  // Own rows of a tile of keys or values.
  CUFLASH_DEVICE uint32_t rows(uint32_t tile_smem) const {
    return tile_smem + warpgroup * tile::kWarpgroupRows * tile::kSlabRowBytes;
  }

  // A key that some queries of a block do not see must not reach their dq, not even as zero times NaN. Those that do see
  // it have a NaN in lse: they lose nothing.
  CUFLASH_DEVICE void clear_keys() const {
    constexpr int kBytes = tile::kWarpgroupRows * tile::kSlabRowBytes;
#pragma unroll 1
    for (int slab = 0; slab < Layout::KTile::kSlabs; ++slab) {
      tile::clear_nonfinite<typename Config::Element, kBytes, tile::kWarpgroupThreads>(
          rows(layout.smem + Layout::kK + slab * Layout::KTile::kSlabBytes), ptx::thread_index() % 128);
    }
    ptx::fence_proxy_async();  // wgmma reads what the threads have written
    ptx::named_barrier_sync(kBarrierConsumers, kBoth);
  }

  // Hands this warpgroup's part of dq to the warp that adds it to global memory.
  template <int kCount>
  CUFLASH_DEVICE void hand_over(const float (&dq)[kCount]) const {
    constexpr int kThreads = tile::kWarpgroupThreads + 32;
    ptx::named_barrier_sync(kBarrierDqEmpty + warpgroup, kThreads);
    tile::store_in_register_order(dq, layout.dq_part(warpgroup));
    ptx::fence_proxy_async();  // the reduction reads through the copy engine
    ptx::named_barrier_arrive(kBarrierDqFull + warpgroup, kThreads);
  }
};

// One turn: scores and d(probs). Then the pointwise part: probabilities and d(scores), packed.
template <class Config, class Params>
CUFLASH_DEVICE void backward_scores(const Params& params, const BackwardConsumer<Config>& self,
                                    const typename Config::Score::Head& score_head, int first_row, bool masked,
                                    uint32_t (&probs)[Config::kBlockQ / 4], uint32_t (&d_scores)[Config::kBlockQ / 4]) {
  using Layout = BackwardSm90Layout<Config>;
  using Element = typename Config::Element;
  constexpr int kBlockQ = Config::kBlockQ, kBlockK = Config::kBlockK;
  const Layout& layout = self.layout;
  const FragmentPlace<true> place{first_row + tile::fragment_col(), self.first_k};
  float dots[kBlockQ / 2], d_probs[kBlockQ / 2];  // [64 keys, block_q]

  layout.q_ring().wait_full(self.at);
  layout.d_out_ring().wait_full(self.at);
  self.take_turn();
  tile::start_scores<Element, kBlockK, kBlockQ, Config::kHeadDim>(dots, self.rows(layout.smem + Layout::kK),
                                                                  layout.q_ring().stage(self.at));
  tile::start_scores<Element, kBlockK, kBlockQ, Config::kHeadDimV>(d_probs, self.rows(layout.smem + Layout::kV),
                                                                   layout.d_out_ring().stage(self.at));
  self.pass_turn();
  ptx::wgmma_wait<1>();
  ptx::wgmma_touch(dots);
  constexpr bool kPlain = !Config::Score::kPreScale;
  if constexpr (kPlain) {
    exponentiate<Config>(dots, masked, params, place, ColumnStats(layout.lse(self.at)));
  } else {
    exponentiate_scores<Config>(dots, probs, masked, params, score_head, place, ColumnStats(layout.lse(self.at)));
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_touch(d_probs);
  // Where only padding is hidden, keys and values are zeros there and d(probs) are finite.
  constexpr bool kCanHide = !Config::Mask::kUniform;
  if (kCanHide && masked) {
    differentiate<Element, true>(d_scores, dots, d_probs, ColumnStats(layout.delta(self.at)));
  } else {
    differentiate<Element, false>(d_scores, dots, d_probs, ColumnStats(layout.delta(self.at)));
  }
  // The derivatives of the plain score are the probabilities. Packed only here, they do not live beside d(probs).
  if constexpr (kPlain) tile::pack_fragment<Element>(dots, probs);
}

// The other turn: dq (of this step, or of the one before), dv and dk.
template <class Config>
CUFLASH_DEVICE void backward_sums(const BackwardConsumer<Config>& self, const uint32_t (&probs)[Config::kBlockQ / 4],
                                  const uint32_t (&d_scores)[Config::kBlockQ / 4], float (&dk)[Config::kHeadDim / 2],
                                  float (&dv)[Config::kHeadDimV / 2]) {
  using Layout = BackwardSm90Layout<Config>;
  using Element = typename Config::Element;
  constexpr int kBlockQ = Config::kBlockQ;
  const Layout& layout = self.layout;
  [[maybe_unused]] float dq[Layout::kDqPartCols / 2];
  if constexpr (Config::kAccumulateDq) {
    const int first_key = self.warpgroup * tile::kWarpgroupRows + ptx::thread_index() % 128 / 32 * 16;
    tile::store_transposed<kBlockQ, Config::kBlockK>(d_scores, layout.d_scores(self.step % 2), first_key);
    ptx::fence_proxy_async();  // wgmma reads what the threads have written
  }
  self.take_turn();
  if constexpr (Config::kAccumulateDq) {
    // Before the first step there is nothing; the product of whatever lies there goes unread, for under a condition it
    // would make the compiler serialise all products.
    start_dq(dq, layout, layout.d_scores((self.step + 1 - self.warpgroup) % 2), self.warpgroup);
  }
  tile::start_output<Element, kBlockQ, Config::kHeadDimV>(dv, probs, layout.d_out_ring().stage(self.at));
  tile::start_output<Element, kBlockQ, Config::kHeadDim>(dk, d_scores, layout.q_ring().stage(self.at));
  self.pass_turn();
  if constexpr (Config::kAccumulateDq) {
    ptx::wgmma_wait<2>();
    ptx::wgmma_touch(dq);
    if (self.warpgroup == 1 || self.step > 0) self.hand_over(dq);
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_touch(dv);
  ptx::wgmma_touch(dk);
  ptx::sync_warp();  // every lane has read its lse and delta
  if (ptx::lane_index() == 0) {
    layout.d_out_ring().release(self.at);
    layout.q_ring().release(self.at);
  }
}

// What is left when the steps are done: warpgroup 0 lets the other have its last turn and makes its last dq.
template <class Config>
CUFLASH_DEVICE void backward_last_turns(const BackwardConsumer<Config>& self) {
  using Layout = BackwardSm90Layout<Config>;
  if (self.warpgroup == 1) return;
  self.take_turn();
  self.pass_turn();
  self.take_turn();
  if constexpr (Config::kAccumulateDq) {
    float dq[Layout::kDqPartCols / 2];
    start_dq(dq, self.layout, self.layout.d_scores((self.step + 1) % 2), self.warpgroup);
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(dq);
    self.hand_over(dq);
  }
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
  BackwardConsumer<Config> self{layout, warpgroup, first_key + own_key + tile::fragment_row(), {}};
  float dk[Config::kHeadDim / 2], dv[Config::kHeadDimV / 2];
#pragma unroll
  for (int i = 0; i < Config::kHeadDim / 2; ++i) dk[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < Config::kHeadDimV / 2; ++i) dv[i] = 0.0f;

  ptx::mbarrier_wait(layout.keys_full(), 0);
  if constexpr (Config::kAccumulateDq && !Config::Mask::kUniform) self.clear_keys();
  if (warpgroup == 1 && steps.first_block < steps.last_block) {
    self.pass_turn();  // warpgroup 0 begins
    self.take_turn();  // its first turn comes before there is anything to do here
    self.pass_turn();
  }
#pragma unroll 1
  for (int head = steps.first_head; head < steps.last_head; ++head) {
    const typename Config::Score::Head score_head = Config::Score::head(params.score, head, work.batch);
#pragma unroll 1
    for (int block = steps.first_block; block < steps.last_block; ++block) {
      const bool masked = !all_visible<typename Config::Mask>(params.mask, block * kBlockQ, kBlockQ, first_key, kBlockK,
                                                              params.seqlen_k);
      uint32_t probs[kBlockQ / 4], d_scores[kBlockQ / 4];
      backward_scores<Config>(params, self, score_head, block * kBlockQ, masked, probs, d_scores);
      backward_sums<Config>(self, probs, d_scores, dk, dv);
      ++self.step;
      self.at.advance();
    }
  }
  if (self.step > 0) backward_last_turns(self);

  // Both warpgroups have read the keys for the last time: their tiles become the way out.
  ptx::named_barrier_sync(kBarrierConsumers, 2 * tile::kWarpgroupThreads);
  const int row = own_key + ptx::thread_index() % 128 / 32 * 16;
  tile::store_to_tensor<Element, kBlockK, Config::kHeadDimV>(dv, 1.0f, layout.smem + Layout::kV, row, &params.dv,
                                                             first_key + row, work.head, work.batch);
  tile::store_to_tensor<Element, kBlockK, Config::kHeadDim>(dk, params.grad_scale, layout.smem + Layout::kK, row,
                                                            &params.dk, first_key + row, work.head, work.batch);
  if (ptx::lane_index() == 0) ptx::bulk_wait_read<0>();  // shared memory outlives its readers
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
