// dq on Hopper without an accumulator: a block keeps its queries and their d_out while the keys and values they see
// stream past, like the forward. Each consumer warpgroup owns 64 queries and meets the others only where keys must be
// cleaned. d(scores) are in registers what the product with the keys takes as its left operand; every sum has a fixed
// order.
//
// With Config::kTurns the warpgroups take turns at starting products, so that one multiplies while the others do their
// pointwise part; it needs a third stage of keys. Left alone they fall into step.
#pragma once
#include "kernels/backward_sm90_parts.cuh"

namespace cuflash {

template <class Config>
struct BackwardSm90DqLayout {
  static constexpr int kBlockQ = Config::kBlockQ, kBlockK = Config::kBlockK;
  static constexpr int kHeadDim = Config::kHeadDim, kHeadDimV = Config::kHeadDimV;
  static constexpr int kKeyStages = Config::kKeyStages, kValueStages = Config::kValueStages;
  static constexpr int kConsumerThreads = Config::kWarpgroups * tile::kWarpgroupThreads;
  static_assert(kBlockQ == Config::kWarpgroups * tile::kWarpgroupRows, "64 queries a warpgroup");

  using QTile = tile::SlabTile<kBlockQ, kHeadDim>;
  using DOutTile = tile::SlabTile<kBlockQ, kHeadDimV>;
  using KTile = tile::SlabTile<kBlockK, kHeadDim>;
  using VTile = tile::SlabTile<kBlockK, kHeadDimV>;
  using KRing = tile::Ring<kKeyStages, KTile::kBytes>;
  using VRing = tile::Ring<kValueStages, VTile::kBytes>;
  static constexpr uint32_t kQ = 0;
  static constexpr uint32_t kDOut = kQ + QTile::kBytes;
  static constexpr uint32_t kK = kDOut + DOutTile::kBytes;
  static constexpr uint32_t kV = kK + KRing::kBufferBytes;
  static constexpr uint32_t kBarriers = kV + VRing::kBufferBytes;
  static constexpr uint32_t kBytes =
      kBarriers + tile::kBarrierBytes + KRing::kBarriersBytes + VRing::kBarriersBytes;
  static_assert(kBytes == Config::kSharedBytes, "the planner reserves what the kernel uses");
  uint32_t smem;

  CUFLASH_DEVICE uint32_t queries_full() const { return smem + kBarriers; }
  CUFLASH_DEVICE KRing k_ring() const { return {smem + kK, queries_full() + tile::kBarrierBytes}; }
  CUFLASH_DEVICE VRing v_ring() const { return {smem + kV, k_ring().barriers + KRing::kBarriersBytes}; }
};

// Blocks of keys that any of a block of queries sees.
template <class Config, class Params>
CUFLASH_DEVICE Range dq_key_blocks(const Params& params, const HeadBlock& work) {
  const int first_row = work.block * Config::kBlockQ;
  const int last_row = tile::smaller(first_row + Config::kBlockQ, params.seqlen_q) - 1;
  const Range keys = Config::Mask::key_range(params.mask, first_row, last_row, params.seqlen_k);
  const int first = keys.begin / Config::kBlockK;
  return {first, keys.is_empty() ? first : (keys.end + Config::kBlockK - 1) / Config::kBlockK};
}

template <class Config, class Params>
CUFLASH_DEVICE HeadBlock dq_block_of(const Params& params) {
  HeadBlock work = head_block_of(ptx::block_index(), params.num_q_blocks, params.num_q_heads, params.batch,
                                 params.heads_per_section);
  if (Config::Mask::kGrows) work.block = params.num_q_blocks - 1 - work.block;  // longest first
  return work;
}

// One thread: queries and d_out once, then values and keys block by block.
template <class Config, class Params>
CUFLASH_DEVICE void dq_produce(const Params& params, const BackwardSm90DqLayout<Config>& layout,
                               const HeadBlock& work) {
  using Layout = BackwardSm90DqLayout<Config>;
  constexpr int kBlockQ = Config::kBlockQ, kBlockK = Config::kBlockK;
  const Range blocks = dq_key_blocks<Config>(params, work);
  const int row = work.block * kBlockQ;
  const int kv_head = work.head / (params.num_q_heads / params.num_kv_heads);
  ptx::mbarrier_arrive_expect_tx(layout.queries_full(), Layout::QTile::kBytes + Layout::DOutTile::kBytes);
  tile::load_slabs<kBlockQ, Config::kHeadDimV>(layout.smem + Layout::kDOut, &params.d_out, layout.queries_full(), row,
                                               work.head, work.batch);
  tile::load_slabs<kBlockQ, Config::kHeadDim>(layout.smem + Layout::kQ, &params.q, layout.queries_full(), row,
                                              work.head, work.batch);
  ptx::prefetch_tensor_map(&params.dq);
  const auto k_ring = layout.k_ring();
  const auto v_ring = layout.v_ring();
  typename Layout::KRing::Position k_at;
  typename Layout::VRing::Position v_at;
#pragma unroll 1
  for (int block = blocks.begin; block < blocks.end; ++block, k_at.advance(), v_at.advance()) {
    v_ring.wait_empty(v_at);
    v_ring.expect(v_at);
    tile::load_slabs<kBlockK, Config::kHeadDimV>(v_ring.stage(v_at), &params.v, v_ring.full(v_at), block * kBlockK,
                                                 kv_head, work.batch);
    k_ring.wait_empty(k_at);
    k_ring.expect(k_at);
    tile::load_slabs<kBlockK, Config::kHeadDim>(k_ring.stage(k_at), &params.k, k_ring.full(k_at), block * kBlockK,
                                                kv_head, work.batch);
  }
}

// A consumer warpgroup and where it stands in the rings.
template <class Config>
struct DqConsumer {
  using Layout = BackwardSm90DqLayout<Config>;
  using Element = typename Config::Element;
  const Layout& layout;
  int warpgroup;
  typename Layout::KRing::Position k_at;
  typename Layout::VRing::Position v_at;

  CUFLASH_DEVICE uint32_t own_rows() const { return warpgroup * tile::kWarpgroupRows * tile::kSlabRowBytes; }

  CUFLASH_DEVICE void take_turn() const {
    if constexpr (Config::kTurns) ptx::named_barrier_sync(kBarrierTurn + warpgroup, 2 * tile::kWarpgroupThreads);
  }
  CUFLASH_DEVICE void pass_turn() const {
    if constexpr (Config::kTurns) {
      const int next = warpgroup + 1 == Config::kWarpgroups ? 0 : warpgroup + 1;
      ptx::named_barrier_arrive(kBarrierTurn + next, 2 * tile::kWarpgroupThreads);
    }
  }

  // A turn is not spent waiting for copies.
  CUFLASH_DEVICE void wait_before_turn() const {
    if constexpr (Config::kTurns) {
      layout.v_ring().wait_full(v_at);
      layout.k_ring().wait_full(k_at);
    }
  }

  // d(probs) and scores, [64 queries, block_k], of the block at the rings' positions; values are free for reuse first.
  CUFLASH_DEVICE void start(float (&dots)[Config::kBlockK / 2], float (&d_probs)[Config::kBlockK / 2]) const {
    if constexpr (!Config::kTurns) layout.v_ring().wait_full(v_at);
    tile::start_scores<Element, Config::kBlockQ, Config::kBlockK, Config::kHeadDimV>(
        d_probs, layout.smem + Layout::kDOut + own_rows(), layout.v_ring().stage(v_at));
    if constexpr (!Config::kTurns) layout.k_ring().wait_full(k_at);
    tile::start_scores<Element, Config::kBlockQ, Config::kBlockK, Config::kHeadDim>(
        dots, layout.smem + Layout::kQ + own_rows(), layout.k_ring().stage(k_at));
  }

  // A key that a query of the block does not see must not reach its dq, not even as zero times NaN; a query that sees
  // it has a NaN in lse and loses nothing. All warpgroups have made their scores before, and wait for the cleaning
  // after.
  CUFLASH_DEVICE void clear_keys() const {
    constexpr int kThreads = Layout::kConsumerThreads;
    ptx::named_barrier_sync(kBarrierConsumers, kThreads);
    tile::clear_nonfinite<Element, Layout::KTile::kBytes, kThreads>(
        layout.k_ring().stage(k_at), ptx::thread_index() - tile::kWarpgroupThreads);
    ptx::fence_proxy_async();  // wgmma reads what the threads have written
    ptx::named_barrier_sync(kBarrierConsumers, kThreads);
  }
};

// d(scores) and dq of a block of keys and, unless it is the last, the two products of the next.
template <class Config, bool kIsLast, class Params>
CUFLASH_DEVICE void dq_step(const Params& params, DqConsumer<Config>& self,
                            const typename Config::Score::Head& score_head, const FragmentPlace<false>& place,
                            const RowStats& lse, const RowStats& delta, bool masked,
                            float (&dots)[Config::kBlockK / 2], float (&d_probs)[Config::kBlockK / 2],
                            float (&dq)[Config::kHeadDim / 2]) {
  using Element = typename Config::Element;
  const bool speaks = ptx::lane_index() == 0;
  uint32_t d_scores[Config::kBlockK / 4];
  if constexpr (Config::Score::kPreScale) {
    exponentiate_scores<Config>(dots, d_scores, masked, params, score_head, place, lse);
  } else {
    exponentiate<Config>(dots, masked, params, place, lse);
  }
  if (!Config::Mask::kUniform && masked) {
    if constexpr (!Config::Mask::kUniform) self.clear_keys();
    differentiate<Element, true>(d_scores, dots, d_probs, delta);
  } else {
    differentiate<Element, false>(d_scores, dots, d_probs, delta);
  }
  const auto k_now = self.k_at;
  if constexpr (!kIsLast) {
    self.k_at.advance();
    self.v_at.advance();
    self.wait_before_turn();
  }
  self.take_turn();
  tile::start_output<Element, Config::kBlockK, Config::kHeadDim>(dq, d_scores, self.layout.k_ring().stage(k_now));
  if constexpr (!kIsLast) self.start(dots, d_probs);
  self.pass_turn();
  if constexpr (!kIsLast) {
    ptx::wgmma_wait<2>();
    if (speaks) self.layout.k_ring().release(k_now);
    ptx::wgmma_wait<1>();
    if (speaks) self.layout.v_ring().release(self.v_at);
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_touch(dq);
  if constexpr (!kIsLast) {
    ptx::wgmma_touch(d_probs);
    ptx::wgmma_touch(dots);
  }
}

// All blocks of keys: a turn for the first scores, then pointwise parts and turns by turns.
template <class Config, class Params>
CUFLASH_DEVICE void dq_blocks(const Params& params, DqConsumer<Config>& self, const HeadBlock& work,
                              const Range& blocks, float (&dq)[Config::kHeadDim / 2]) {
  constexpr int kBlockQ = Config::kBlockQ, kBlockK = Config::kBlockK;
  const int first_row = work.block * kBlockQ;
  const int row = first_row + self.warpgroup * tile::kWarpgroupRows + tile::fragment_row();
  const int64_t stat =
      (static_cast<int64_t>(work.batch) * params.num_q_heads + work.head) * params.stat_rows + row;
  // lse and delta come from the kernel before the one before this: that one had them when it let this one start.
  const RowStats lse{tile::read(params.lse_log2 + stat), tile::read(params.lse_log2 + stat + 8)};
  const RowStats delta{tile::read(params.delta + stat), tile::read(params.delta + stat + 8)};
  const typename Config::Score::Head score_head = Config::Score::head(params.score, work.head, work.batch);
  float dots[kBlockK / 2], d_probs[kBlockK / 2];  // [64 queries, block_k]

  if (!blocks.is_empty()) {
    if (self.warpgroup + 1 == Config::kWarpgroups) self.pass_turn();  // warpgroup 0 begins
    self.wait_before_turn();
    self.take_turn();
    self.start(dots, d_probs);
    self.pass_turn();
    ptx::wgmma_wait<0>();
    if (ptx::lane_index() == 0) self.layout.v_ring().release(self.v_at);
  }
  ptx::wgmma_touch(dots);
  ptx::wgmma_touch(d_probs);
  int key = blocks.begin * kBlockK;
  const auto is_masked = [&] {
    return !all_visible<typename Config::Mask>(params.mask, first_row, kBlockQ, key, kBlockK, params.seqlen_k);
  };
  const auto place = [&] { return FragmentPlace<false>{row, key + tile::fragment_col()}; };
#pragma unroll 1
  for (; key < (blocks.end - 1) * kBlockK; key += kBlockK) {
    dq_step<Config, false>(params, self, score_head, place(), lse, delta, is_masked(), dots, d_probs, dq);
  }
  if (blocks.is_empty()) return;
  dq_step<Config, true>(params, self, score_head, place(), lse, delta, is_masked(), dots, d_probs, dq);
  if (self.warpgroup == 0) self.take_turn();  // passed for nothing, but no barrier is left odd
}

template <class Config, class Params>
CUFLASH_DEVICE void dq_consume(const Params& params, const BackwardSm90DqLayout<Config>& layout, const HeadBlock& work,
                               int warpgroup) {
  using Layout = BackwardSm90DqLayout<Config>;
  constexpr int kBlockQ = Config::kBlockQ;
  const Range blocks = dq_key_blocks<Config>(params, work);
  const int first_row = work.block * kBlockQ;
  DqConsumer<Config> self{layout, warpgroup, {}, {}};
  float dq[Config::kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < Config::kHeadDim / 2; ++i) dq[i] = 0.0f;
  ptx::mbarrier_wait(layout.queries_full(), 0);
  dq_blocks(params, self, work, blocks, dq);

  // A warpgroup reads only its own rows of the queries: they become the way out without a meeting of both.
  ptx::named_barrier_sync(kBarrierDqFull + warpgroup, tile::kWarpgroupThreads);
  const int row = warpgroup * tile::kWarpgroupRows + ptx::thread_index() % 128 / 32 * 16;
  tile::store_to_tensor<typename Config::Element, kBlockQ, Config::kHeadDim>(
      dq, params.grad_scale, layout.smem + Layout::kQ, row, &params.dq, first_row + row, work.head, work.batch);
  if (ptx::lane_index() == 0) ptx::bulk_wait_read<0>();  // shared memory outlives its readers
}

// Warp 0 copies in; the warpgroups after the first multiply, two of them with 240 registers a thread or three with 160.
template <class Config, class Params>
CUFLASH_DEVICE void backward_sm90_dq(const Params& params) {
  using Layout = BackwardSm90DqLayout<Config>;
  const Layout layout{ptx::dynamic_shared()};
  const int warpgroup = ptx::warp_index() / 4;
  if (ptx::thread_index() == 0) {
    constexpr int kConsumerWarps = 4 * Config::kWarpgroups;
    ptx::mbarrier_init(layout.queries_full(), 1);
    layout.k_ring().init(kConsumerWarps);
    layout.v_ring().init(kConsumerWarps);
    ptx::mbarrier_init_fence();
  }
  ptx::sync_cta();  // barriers exist
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kWarpgroups == 2 ? 24 : 32>();
    if (ptx::thread_index() == 0) {
      dq_produce(params, layout, dq_block_of<Config>(params));
      ptx::griddepcontrol_wait();  // for nothing of its own: whoever waits for this kernel has waited for those before
    }
  } else {
    ptx::setmaxnreg_inc<Config::kWarpgroups == 2 ? 240 : 160>();
    dq_consume(params, layout, dq_block_of<Config>(params), warpgroup - 1);
  }
}

}  // namespace cuflash
