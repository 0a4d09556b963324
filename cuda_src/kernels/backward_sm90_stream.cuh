// The loop over queries of the kernels that keep a tile of keys: which steps a block takes, its barriers, and the
// thread that copies in.
#pragma once
#include "kernels/backward_sm90_parts.cuh"
#include "ptx/shuffle.cuh"

namespace cuflash {

// Barriers of keys and values, and of the rings of queries and d_out, which eight consumer warps release.
template <class Layout>
CUFLASH_DEVICE void init_backward_barriers(const Layout& layout) {
  constexpr int kConsumerWarps = 8;
  if (ptx::thread_index() == 0) {
    ptx::mbarrier_init(layout.keys_full(), 1);
    ptx::mbarrier_init(layout.values_full(), 1);
    layout.q_ring().init(kConsumerWarps);
    layout.d_out_ring().init(kConsumerWarps);
    ptx::mbarrier_init_fence();
  }
  ptx::sync_cta();  // barriers exist
}

template <class Params>
CUFLASH_DEVICE HeadBlock key_block_of(const Params& params) {
  return head_block_of(ptx::block_index(), params.num_k_blocks, params.num_kv_heads, params.batch,
                       params.heads_per_section);
}

// The steps of one block of keys: every query head of its group, every block of queries that sees any of the keys.
struct BackwardSteps {
  int first_head, last_head;    // query heads
  int first_block, last_block;  // blocks of queries

  CUFLASH_DEVICE int count() const { return (last_head - first_head) * (last_block - first_block); }
};

// Whether some key of the block is hidden from some query of a block, and may be worth more than padding.
template <class Config, class Params>
CUFLASH_DEVICE bool hides_keys(const Params& params, const HeadBlock& work, int q_block) {
  using Mask = typename Config::Mask;
  constexpr int kBlockQ = Config::kBlockQ, kBlockK = Config::kBlockK;
  return !Mask::kUniform &&
         !all_visible<Mask>(params.mask, q_block * kBlockQ, kBlockQ, work.block * kBlockK, kBlockK, params.seqlen_k);
}

// A query must not reach dk and dv of keys that it does not see, not even as zero times NaN. Whether any of a block,
// whose lse this is, has something that is not finite, or in d_out (see backward_sm90_prepare); the same in all warps.
// Cleared of it, a query loses nothing where it is seen: its probabilities are NaN.
template <int kBlockQ>
CUFLASH_DEVICE bool has_nonfinite_queries(uint32_t lse_smem) {
  bool found = false;
#pragma unroll
  for (int row = ptx::lane_index(); row < kBlockQ; row += 32) {
    found |= !(tile::magnitude(ptx::load_shared<float>(lse_smem + row * 4)) < kInfinity);
  }
  return ptx::vote_any(found);
}

// One of the steps, in order.
struct BackwardStep {
  int head, block;

  CUFLASH_DEVICE void advance(const BackwardSteps& steps) {
    if (++block == steps.last_block) {
      block = steps.first_block;
      ++head;
    }
  }
};

template <class Config, class Params>
CUFLASH_DEVICE BackwardSteps backward_steps(const Params& params, const HeadBlock& work) {
  const int first_key = work.block * Config::kBlockK;
  const int last_key = tile::smaller(first_key + Config::kBlockK, params.seqlen_k) - 1;
  const Range rows = Config::Mask::query_range(params.mask, first_key, last_key, params.seqlen_q);
  const int group = params.num_q_heads / params.num_kv_heads;
  const int first_block = rows.begin / Config::kBlockQ;
  const int last_block = rows.is_empty() ? first_block : (rows.end + Config::kBlockQ - 1) / Config::kBlockQ;
  return {work.head * group, work.head * group + group, first_block, last_block};
}

// The values, 64 columns a load.
template <class Config, class Layout, class Params>
CUFLASH_DEVICE void load_values(const Params& params, const Layout& layout, const HeadBlock& work) {
  ptx::mbarrier_arrive_expect_tx(layout.values_full(), Layout::VTile::kBytes);
  tile::load_slabs<Config::kBlockK, Config::kHeadDimV>(layout.smem + Layout::kV, &params.v, layout.values_full(),
                                                       work.block * Config::kBlockK, work.head, work.batch);
}

// One thread: keys and values once, queries and d_out block by block. What the first product needs comes first: keys
// and queries, then values and d_out.
template <class Config, class Layout, class Params>
CUFLASH_DEVICE void backward_produce(const Params& params, const Layout& layout, const HeadBlock& work) {
  const BackwardSteps steps = backward_steps<Config>(params, work);
  ptx::mbarrier_arrive_expect_tx(layout.keys_full(), Layout::KTile::kBytes);
  tile::load_slabs<Config::kBlockK, Config::kHeadDim>(layout.smem + Layout::kK, &params.k, layout.keys_full(),
                                                      work.block * Config::kBlockK, work.head, work.batch);
  ptx::prefetch_tensor_map(&params.dk);
  ptx::prefetch_tensor_map(&params.dv);
  ptx::griddepcontrol_wait();  // lse, delta and the zeroed accumulator come from the kernel before
  typename Layout::QRing::Position q_at;
  typename Layout::DOutRing::Position d_out_at;
  const auto q_ring = layout.q_ring();
  const auto d_out_ring = layout.d_out_ring();
  bool has_values = false;
#pragma unroll 1
  for (int head = steps.first_head; head < steps.last_head; ++head) {
    int64_t stat = (static_cast<int64_t>(work.batch) * params.num_q_heads + head) * params.stat_rows +
                   steps.first_block * Config::kBlockQ;
    const int last_row = steps.last_block * Config::kBlockQ;
#pragma unroll 1
    for (int row = steps.first_block * Config::kBlockQ; row < last_row; row += Config::kBlockQ) {
      q_ring.wait_empty(q_at);
      ptx::mbarrier_arrive_expect_tx(q_ring.full(q_at), Layout::QTile::kBytes + 2 * Layout::kStatBytes);
      tile::load_slabs<Config::kBlockQ, Config::kHeadDim>(q_ring.stage(q_at), &params.q, q_ring.full(q_at), row, head,
                                                          work.batch);
      ptx::bulk_load(layout.lse(q_at), params.lse_log2 + stat, Layout::kStatBytes, q_ring.full(q_at));
      ptx::bulk_load(layout.delta(q_at), params.delta + stat, Layout::kStatBytes, q_ring.full(q_at));
      stat += Config::kBlockQ;
      q_at.advance();
      if (!has_values) load_values<Config>(params, layout, work);
      has_values = true;
      d_out_ring.wait_empty(d_out_at);
      ptx::mbarrier_arrive_expect_tx(d_out_ring.full(d_out_at), Layout::DOutTile::kBytes);
      tile::load_slabs<Config::kBlockQ, Config::kHeadDimV>(d_out_ring.stage(d_out_at), &params.d_out,
                                                           d_out_ring.full(d_out_at), row, head, work.batch);
      d_out_at.advance();
    }
  }
}

}  // namespace cuflash
