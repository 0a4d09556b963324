// dk, dv and, by way of a float32 accumulator, dq on Hopper: one block a tile of keys, which stays in shared memory
// while the queries that see it stream past. A producer warpgroup copies; two consumer warpgroups own 64 keys each.
//
// Scores and d(probs) are computed transposed, [keys, queries], so that probabilities and d(scores) are in registers
// just what the products for dv and dk take as their left operand. Only dq, which sums over keys, needs d(scores) of
// both warpgroups: they pass through shared memory. dq of a step goes to shared memory too and is added to global
// memory by a warp of the producer, in any order or (Config::kOrderedDq) one block of keys after the other.
//
// The warpgroups take turns at starting products, so that one multiplies while the other does its pointwise part; left
// alone they fall into step, and the tensor cores idle through every exponential. A turn is long: dq, dv and dk of a
// step, then scores and d(probs) of the next, each product started while the one before it runs.
//   warpgroup 0: turn | pointwise | turn ...
//   warpgroup 1:        turn      | pointwise ...
// When warpgroup 0 has its turn for step n, the other's d(scores) exist up to step n - 1: its dq is one step late.
// The turns order everything that the warpgroups share: whoever has a turn sees what the other did before its last one.
#pragma once
#include "kernels/backward_sm90_roles.cuh"

namespace cuflash {

// A consumer warpgroup and where it stands.
template <class Config>
struct BackwardConsumer {
  using Layout = BackwardSm90Layout<Config>;
  using Element = typename Config::Element;
  static constexpr int kBoth = 2 * tile::kWarpgroupThreads;
  static constexpr int kBlockQ = Config::kBlockQ, kBlockK = Config::kBlockK;
  const Layout& layout;
  int warpgroup;
  int first_k;  // key of this thread's first accumulator
  int number = 0;  // of the step whose sums come next
  typename Layout::QRing::Position q_at;  // stage of that step
  typename Layout::DOutRing::Position own_d_out_at;  // only where the rings are not equally long

  CUFLASH_DEVICE typename Layout::DOutRing::Position d_out_at() const {
    if constexpr (Layout::kQueryStages == Layout::kDOutStages) return q_at;
    else return own_d_out_at;
  }
  CUFLASH_DEVICE void advance() {
    q_at.advance();
    own_d_out_at.advance();
  }

  CUFLASH_DEVICE void take_turn() const { ptx::named_barrier_sync(kBarrierTurn + warpgroup, kBoth); }
  CUFLASH_DEVICE void pass_turn() const { ptx::named_barrier_arrive(kBarrierTurn + 1 - warpgroup, kBoth); }

  // First of this warp's 16 rows of a tile of keys or values.
  CUFLASH_DEVICE int own_row() const { return (static_cast<int>(ptx::thread_index()) / 32 - 4) * 16; }

  // Own rows of a tile of keys or values.
  CUFLASH_DEVICE uint32_t rows(uint32_t tile_smem) const {
    return tile_smem + warpgroup * tile::kWarpgroupRows * tile::kSlabRowBytes;
  }

  // A key that some queries of a block do not see must not reach their dq, not even as zero times NaN. Those that do
  // see it have a NaN in lse: they lose nothing. The own scores of the first step have been made; dq comes a turn
  // later.
  CUFLASH_DEVICE void clear_keys() const {
    constexpr int kBytes = tile::kWarpgroupRows * tile::kSlabRowBytes;
#pragma unroll 1
    for (int slab = 0; slab < Layout::KTile::kSlabs; ++slab) {
      tile::clear_nonfinite<Element, kBytes, tile::kWarpgroupThreads>(
          rows(layout.smem + Layout::kK + slab * Layout::KTile::kSlabBytes), ptx::thread_index() % 128);
    }
  }

  // Warpgroup 0 is the first to use a stage, and the other only gets its turn when this is done.
  template <class Tile>
  CUFLASH_DEVICE void clear_queries(uint32_t tile_smem) const {
    tile::clear_nonfinite<Element, Tile::kBytes, tile::kWarpgroupThreads>(
        tile_smem, ptx::thread_index() % tile::kWarpgroupThreads);
    ptx::fence_proxy_async();  // wgmma reads what the threads have written
    ptx::named_barrier_sync(kBarrierProbsFull, tile::kWarpgroupThreads);
  }

  // Scores, [64 keys, block_q], of the stage, and d(probs) of the same step. hides_keys: see there.
  CUFLASH_DEVICE void start_dots(float (&dots)[kBlockQ / 2], bool hides_keys) const {
    layout.q_ring().wait_full(q_at);
    if (warpgroup == 0 && hides_keys && has_nonfinite_queries<kBlockQ>(layout.lse(q_at))) {
      clear_queries<typename Layout::QTile>(layout.q_ring().stage(q_at));
    }
    tile::start_scores<Element, kBlockK, kBlockQ, Config::kHeadDim>(dots, rows(layout.smem + Layout::kK),
                                                                    layout.q_ring().stage(q_at));
  }
  CUFLASH_DEVICE void start_d_probs(float (&d_probs)[kBlockQ / 2], bool hides_keys) const {
    layout.d_out_ring().wait_full(d_out_at());
    if (warpgroup == 0 && hides_keys && has_nonfinite_queries<kBlockQ>(layout.lse(q_at))) {
      clear_queries<typename Layout::DOutTile>(layout.d_out_ring().stage(d_out_at()));
    }
    tile::start_scores<Element, kBlockK, kBlockQ, Config::kHeadDimV>(d_probs, rows(layout.smem + Layout::kV),
                                                                     layout.d_out_ring().stage(d_out_at()));
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

// Scores and d(probs), still being made, become probabilities and d(scores), packed, and d(scores) in shared memory.
template <class Config, class Params>
CUFLASH_DEVICE void backward_pointwise(const Params& params, const BackwardConsumer<Config>& self,
                                       const HeadBlock& work, const BackwardStep& step,
                                       float (&dots)[Config::kBlockQ / 2], float (&d_probs)[Config::kBlockQ / 2],
                                       uint32_t (&probs)[Config::kBlockQ / 4],
                                       uint32_t (&d_scores)[Config::kBlockQ / 4]) {
  using Element = typename Config::Element;
  using Mask = typename Config::Mask;
  constexpr int kBlockQ = Config::kBlockQ, kBlockK = Config::kBlockK;
  constexpr bool kPlain = !Config::Score::kPreScale;
  const auto& layout = self.layout;
  const int first_row = step.block * kBlockQ;
  const int tile_key = work.block * kBlockK;
  const bool masked = !all_visible<Mask>(params.mask, first_row, kBlockQ, tile_key, kBlockK, params.seqlen_k);
  const FragmentPlace<true> place{first_row + tile::fragment_col(), self.first_k};
  ptx::wgmma_wait<1>();
  ptx::wgmma_touch(dots);
  if constexpr (kPlain) {
    exponentiate<Config>(dots, masked, params, place, ColumnStats(layout.lse(self.q_at)));
  } else {
    const typename Config::Score::Head head = Config::Score::head(params.score, step.head, work.batch);
    exponentiate_scores<Config>(dots, probs, masked, params, head, place, ColumnStats(layout.lse(self.q_at)));
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_touch(d_probs);
  // Where only padding is hidden, keys and values are zeros there and d(probs) are finite.
  if (!Mask::kUniform && masked) {
    differentiate<Element, true>(d_scores, dots, d_probs, ColumnStats(layout.delta(self.q_at)));
  } else {
    differentiate<Element, false>(d_scores, dots, d_probs, ColumnStats(layout.delta(self.q_at)));
  }
  // The derivatives of the plain score are the probabilities. Packed only here, they do not live beside d(probs).
  if constexpr (kPlain) tile::pack_fragment<Element>(dots, probs);
  tile::store_transposed<kBlockQ, kBlockK>(d_scores, layout.d_scores(self.number % 2), self.own_row());
  ptx::fence_proxy_async();  // wgmma reads what the threads have written
}

// One turn: the sums of a step and, unless it is the last, scores and d(probs) of the next, of which hides_next tells
// whether it hides keys.
template <class Config, bool kIsLast>
CUFLASH_DEVICE void backward_turn(BackwardConsumer<Config>& self, bool hides_next, float (&dots)[Config::kBlockQ / 2],
                                  float (&d_probs)[Config::kBlockQ / 2],
                                  const uint32_t (&probs)[Config::kBlockQ / 4],
                                  const uint32_t (&d_scores)[Config::kBlockQ / 4],
                                  float (&dk)[Config::kHeadDim / 2], float (&dv)[Config::kHeadDimV / 2]) {
  using Layout = BackwardSm90Layout<Config>;
  using Element = typename Config::Element;
  constexpr int kBlockQ = Config::kBlockQ;
  const Layout& layout = self.layout;
  const bool speaks = ptx::lane_index() == 0;
  const auto q_now = self.q_at;
  const auto d_out_now = self.d_out_at();
  float dq[Layout::kDqPartCols / 2];
  self.take_turn();
  // Warpgroup 0 has nothing before its first step; the product of whatever lies there goes unread, for under a
  // condition it would make the compiler serialise all products. It takes values for keys, which the other may be
  // clearing.
  const bool has_dq = self.warpgroup == 1 || self.number > 0;
  start_dq<Config>(dq, layout.smem + (has_dq ? Layout::kK : Layout::kV),
                   layout.d_scores((self.number + 1 - self.warpgroup) % 2), self.warpgroup);
  tile::start_output<Element, kBlockQ, Config::kHeadDimV>(dv, probs, layout.d_out_ring().stage(d_out_now));
  tile::start_output<Element, kBlockQ, Config::kHeadDim>(dk, d_scores, layout.q_ring().stage(q_now));
  ptx::wgmma_wait<2>();
  ptx::wgmma_touch(dq);
  if (has_dq) self.hand_over(dq);
  ++self.number;
  self.advance();
  ptx::wgmma_wait<1>();
  ptx::wgmma_touch(dv);
  ptx::sync_warp();  // every lane has read its lse and delta
  if (speaks) layout.d_out_ring().release(d_out_now);
  if constexpr (kIsLast) {
    ptx::wgmma_wait<0>();
  } else {
    self.start_dots(dots, hides_next);
    ptx::wgmma_wait<1>();
  }
  ptx::wgmma_touch(dk);
  if (speaks) layout.q_ring().release(q_now);
  if constexpr (!kIsLast) self.start_d_probs(d_probs, hides_next);
  self.pass_turn();
}

// A warpgroup alone reads its rows of the values: they become the way out of its rows of dv.
template <class Config, class Params>
CUFLASH_DEVICE void store_dv(const Params& params, const BackwardConsumer<Config>& self, int number,
                             const float (&dv)[Config::kHeadDimV / 2]) {
  using Layout = BackwardSm90Layout<Config>;
  constexpr int kBlockK = Config::kBlockK;
  const int row = self.own_row();
  const HeadBlock work = key_block_again<Config>(params, self.layout, number);
  ptx::named_barrier_sync(kBarrierProbsFull + self.warpgroup, tile::kWarpgroupThreads);  // read by all four warps
  tile::store_to_tensor<typename Config::Element, kBlockK, Config::kHeadDimV>(
      dv, 1.0f, self.layout.smem + Layout::kV, row, &params.dv, work.block * kBlockK + row, work.head, work.batch);
}

// All steps: a turn for the first scores, then pointwise parts and turns by turns.
template <class Config, class Params>
CUFLASH_DEVICE void backward_steps_of(const Params& params, BackwardConsumer<Config>& self, const HeadBlock& work,
                                      const BackwardSteps& steps, int tile_number, float (&dk)[Config::kHeadDim / 2],
                                      float (&dv)[Config::kHeadDimV / 2]) {
  using Layout = BackwardSm90Layout<Config>;
  const int count = steps.count();
  float dots[Config::kBlockQ / 2], d_probs[Config::kBlockQ / 2];        // [64 keys, block_q]
  uint32_t probs[Config::kBlockQ / 4], d_scores[Config::kBlockQ / 4];  // the same in packed pairs
  BackwardStep step{steps.first_head, steps.first_block};
  self.number = 0;
  if (self.warpgroup == 1) self.pass_turn();  // warpgroup 0 begins
  self.take_turn();
  const bool hides_first = hides_keys<Config>(params, work, step.block);
  self.start_dots(dots, hides_first);
  ptx::mbarrier_wait(self.layout.values_full(), tile_number % 2);
  self.start_d_probs(d_probs, hides_first);
  self.pass_turn();
  if constexpr (!Config::Mask::kUniform) {
    ptx::wgmma_wait<1>();
    self.clear_keys();
  }
  backward_pointwise<Config>(params, self, work, step, dots, d_probs, probs, d_scores);
#pragma unroll 1
  while (self.number + 1 < count) {
    step.advance(steps);
    backward_turn<Config, false>(self, hides_keys<Config>(params, work, step.block), dots, d_probs, probs, d_scores, dk,
                                 dv);
    backward_pointwise<Config>(params, self, work, step, dots, d_probs, probs, d_scores);
  }
  backward_turn<Config, true>(self, false, dots, d_probs, probs, d_scores, dk, dv);

  store_dv(params, self, tile_number, dv);  // while the other has its last turn
  if (self.warpgroup == 0) {
    self.take_turn();  // the other's last d(scores) are there
    float dq[Layout::kDqPartCols / 2];
    start_dq<Config>(dq, self.layout.smem + Layout::kK, self.layout.d_scores((self.number + 1) % 2), self.warpgroup);
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(dq);
    self.hand_over(dq);
  }
}

template <class Config, class Params>
CUFLASH_DEVICE void backward_consume(const Params& params, const BackwardSm90Layout<Config>& layout,
                                     const HeadBlock& work, int number, BackwardConsumer<Config>& self) {
  using Layout = BackwardSm90Layout<Config>;
  using Element = typename Config::Element;
  constexpr int kBlockK = Config::kBlockK;
  const BackwardSteps steps = backward_steps<Config>(params, work);
  self.first_k = work.block * kBlockK + self.warpgroup * tile::kWarpgroupRows + tile::fragment_row();
  float dk[Config::kHeadDim / 2], dv[Config::kHeadDimV / 2];
#pragma unroll
  for (int i = 0; i < Config::kHeadDim / 2; ++i) dk[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < Config::kHeadDimV / 2; ++i) dv[i] = 0.0f;

  ptx::mbarrier_wait(layout.keys_full(), number % 2);
  if (steps.count() > 0) {
    backward_steps_of(params, self, work, steps, number, dk, dv);
  } else {
    ptx::mbarrier_wait(layout.values_full(), number % 2);
    store_dv(params, self, number, dv);
  }

  // Both warpgroups have read the keys for the last time: their tile becomes the way out.
  ptx::named_barrier_sync(kBarrierConsumers, 2 * tile::kWarpgroupThreads);
  const int row = self.own_row();
  const HeadBlock to = key_block_again<Config>(params, layout, number);
  tile::store_to_tensor<Element, kBlockK, Config::kHeadDim>(dk, params.grad_scale, layout.smem + Layout::kK, row,
                                                            &params.dk, to.block * kBlockK + row, to.head, to.batch);
  if (ptx::lane_index() == 0) {
    ptx::bulk_wait_read<0>();  // shared memory outlives its readers
    if constexpr (Config::kPersistent) ptx::mbarrier_arrive(layout.keys_empty());
  }
}

// Warps 0 to 3 copy in (0) and add dq (1, 2); the others multiply.
template <class Config, class Params>
CUFLASH_DEVICE void backward_sm90(const Params& params) {
  using Layout = BackwardSm90Layout<Config>;
  const Layout layout{ptx::dynamic_shared()};
  const int warp = ptx::warp_index();
  if (Config::kPersistent && ptx::thread_index() == 0) {
    ptx::mbarrier_init(layout.keys_empty(), 8);  // consumer warps
    layout.board().init();
  }
  init_backward_barriers(layout);
  // Each role finds its work for itself: nothing is carried over the change of registers.
  if (warp < 4) {
    ptx::setmaxnreg_dec<504 - 2 * Config::kConsumerRegisters>();
    if (ptx::thread_index() == 0) {
      backward_produce<Config>(params, layout);
    } else if (warp == 1 || warp == 2) {
      ptx::griddepcontrol_wait();  // the kernel before zeroed the accumulator or its turns
      for_key_blocks<Config, false>(params, layout, [&](const HeadBlock& work, int) {
        backward_add_dq(params, layout, work, warp - 1);
      });
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    BackwardConsumer<Config> self{layout, warp / 4 - 1, 0};
    for_key_blocks<Config, false>(params, layout, [&](const HeadBlock& work, int number) {
      backward_consume(params, layout, work, number, self);
    });
  }
}

}  // namespace cuflash
