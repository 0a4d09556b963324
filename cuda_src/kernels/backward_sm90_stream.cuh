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

// How the warps of a persistent block learn which block of keys is next: the thread that copies in draws a ticket and
// posts it in one of two slots. Whoever holds a ticket runs, so that a block of keys never waits for one that has yet
// to find a place, however many blocks are on the device.
struct TicketBoard {
  static constexpr int kReaders = 10;  // warps: eight consumers, two that add dq
  static constexpr uint32_t kBytes = 2 * (2 * tile::kBarrierBytes + 8);
  uint32_t smem;

  CUFLASH_DEVICE uint32_t full(int number) const { return smem + number % 2 * tile::kBarrierBytes; }
  CUFLASH_DEVICE uint32_t empty(int number) const { return full(number) + 2 * tile::kBarrierBytes; }
  CUFLASH_DEVICE uint32_t slot(int number) const { return smem + 4 * tile::kBarrierBytes + number % 2 * 8; }

  CUFLASH_DEVICE void init() const {
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(full(i), 1);
      ptx::mbarrier_init(empty(i), kReaders);
    }
  }
  CUFLASH_DEVICE int draw(uint32_t* tickets_gmem, int number) const {
    const int ticket = ptx::atomic_add(tickets_gmem, 1u);
    ptx::mbarrier_wait(empty(number), (number / 2 + 1) % 2);  // at first it is empty
    ptx::store_shared(slot(number), ticket);
    ptx::mbarrier_arrive(full(number));
    return ticket;
  }
  CUFLASH_DEVICE void wait(int number) const { ptx::mbarrier_wait(full(number), number / 2 % 2); }
  CUFLASH_DEVICE int read(int number) const { return ptx::load_shared<int>(slot(number)); }
  // All lanes of a warp.
  CUFLASH_DEVICE void release(int number) const {
    ptx::sync_warp();  // all have read
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(empty(number));
  }
};

template <class Params>
CUFLASH_DEVICE HeadBlock key_block_at(const Params& params, int index) {
  return head_block_of(index, params.num_k_blocks, params.num_kv_heads, params.batch, params.heads_per_section);
}

// Which block of keys it is, asked once more: what is computed from the answer needs no registers in between.
template <class Config, class Layout, class Params>
CUFLASH_DEVICE HeadBlock key_block_again(const Params& params, const Layout& layout, int number) {
  if constexpr (Config::kPersistent) return key_block_at(params, layout.board().read(number));
  else return key_block_at(params, ptx::block_index_again());
}

// Calls body with each of this block's blocks of keys and its number among them: one or, with Config::kPersistent, as
// many as it draws tickets for.
template <class Config, bool kDraws, class Layout, class Params, class Body>
CUFLASH_DEVICE void for_key_blocks(const Params& params, const Layout& layout, Body&& body) {
  if constexpr (Config::kPersistent) {
    const auto board = layout.board();
#pragma unroll 1
    for (int number = 0;; ++number) {
      int ticket;
      if constexpr (kDraws) {
        ticket = board.draw(params.tickets, number);
      } else {
        board.wait(number);
        ticket = board.read(number);
      }
      if (ticket >= params.num_k_blocks * params.num_kv_heads * params.batch) break;
      body(key_block_at(params, ticket), number);
      if constexpr (!kDraws) board.release(number);
    }
  } else {
    body(key_block_at(params, ptx::block_index()), 0);
  }
}

// The steps of one block of keys: every query head of its group, every block of queries that sees any of the keys.
// Where dq is added up in a fixed order the last queries come first: then all blocks of keys begin with queries that
// all of them see, or with such that the blocks before them reach earlier, and hardly wait for each other.
struct BackwardSteps {
  int first_head, last_head;         // query heads
  int first_block, end_block, stride;  // blocks of queries

  CUFLASH_DEVICE int count() const { return (last_head - first_head) * (end_block - first_block) * stride; }
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
    block += steps.stride;
    if (block == steps.end_block) {
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
  if constexpr (Config::kOrderedDq) {
    return {work.head * group, work.head * group + group, last_block - 1, first_block - 1, -1};
  } else {
    return {work.head * group, work.head * group + group, first_block, last_block, 1};
  }
}

// Where the thread that copies in stands in the rings.
template <class Layout>
struct BackwardProducer {
  typename Layout::QRing::Position q_at;
  typename Layout::DOutRing::Position d_out_at;
};

template <class Config, class Layout, class Params>
CUFLASH_DEVICE void load_keys(const Params& params, const Layout& layout, const HeadBlock& work) {
  ptx::mbarrier_arrive_expect_tx(layout.keys_full(), Layout::KTile::kBytes);
  tile::load_slabs<Config::kBlockK, Config::kHeadDim>(layout.smem + Layout::kK, &params.k, layout.keys_full(),
                                                      work.block * Config::kBlockK, work.head, work.batch);
}
template <class Config, class Layout, class Params>
CUFLASH_DEVICE void load_values(const Params& params, const Layout& layout, const HeadBlock& work) {
  ptx::mbarrier_arrive_expect_tx(layout.values_full(), Layout::VTile::kBytes);
  tile::load_slabs<Config::kBlockK, Config::kHeadDimV>(layout.smem + Layout::kV, &params.v, layout.values_full(),
                                                       work.block * Config::kBlockK, work.head, work.batch);
}

// One block of queries with its lse and delta.
template <class Config, class Layout, class Params>
CUFLASH_DEVICE void load_queries(const Params& params, const Layout& layout, const HeadBlock& work,
                                 const BackwardStep& step, typename Layout::QRing::Position at) {
  const int row = step.block * Config::kBlockQ;
  const int64_t stat = (static_cast<int64_t>(work.batch) * params.num_q_heads + step.head) * params.stat_rows + row;
  const auto ring = layout.q_ring();
  ring.wait_empty(at);
  ptx::mbarrier_arrive_expect_tx(ring.full(at), Layout::QTile::kBytes + 2 * Layout::kStatBytes);
  tile::load_slabs<Config::kBlockQ, Config::kHeadDim>(ring.stage(at), &params.q, ring.full(at), row, step.head,
                                                    work.batch);
  ptx::bulk_load(layout.lse(at), params.lse_log2 + stat, Layout::kStatBytes, ring.full(at));
  ptx::bulk_load(layout.delta(at), params.delta + stat, Layout::kStatBytes, ring.full(at));
}

template <class Config, class Layout, class Params>
CUFLASH_DEVICE void load_d_out(const Params& params, const Layout& layout, const HeadBlock& work,
                               const BackwardStep& step, typename Layout::DOutRing::Position at) {
  const auto ring = layout.d_out_ring();
  ring.wait_empty(at);
  ptx::mbarrier_arrive_expect_tx(ring.full(at), Layout::DOutTile::kBytes);
  tile::load_slabs<Config::kBlockQ, Config::kHeadDimV>(ring.stage(at), &params.d_out, ring.full(at),
                                                       step.block * Config::kBlockQ, step.head, work.batch);
}

// One thread: keys and values once, queries and d_out block by block. What the first product needs comes first: keys
// and queries, then values and d_out. A persistent block has its first queries before the keys, whose place becomes
// free when the gradients of the keys before have left it.
template <class Config, class Layout, class Params>
CUFLASH_DEVICE void produce_key_block(const Params& params, const Layout& layout, const HeadBlock& work, int number,
                                      BackwardProducer<Layout>& self) {
  const BackwardSteps steps = backward_steps<Config>(params, work);
  BackwardStep step{steps.first_head, steps.first_block};
  int left = steps.count();
  if (left > 0) load_queries<Config>(params, layout, work, step, self.q_at);
  if constexpr (Config::kPersistent) {
    ptx::mbarrier_wait(layout.keys_empty(), (number + 1) % 2);  // at first it is empty
    load_keys<Config>(params, layout, work);
  }
  load_values<Config>(params, layout, work);
#pragma unroll 1
  while (left > 0) {
    load_d_out<Config>(params, layout, work, step, self.d_out_at);
    self.q_at.advance();
    self.d_out_at.advance();
    step.advance(steps);
    if (--left > 0) load_queries<Config>(params, layout, work, step, self.q_at);
  }
}

template <class Config, class Layout, class Params>
CUFLASH_DEVICE void backward_produce(const Params& params, const Layout& layout) {
  BackwardProducer<Layout> self;
  ptx::prefetch_tensor_map(&params.dk);
  ptx::prefetch_tensor_map(&params.dv);
  if constexpr (Config::kPersistent) ptx::griddepcontrol_wait();  // the kernel before laid out the tickets
  for_key_blocks<Config, true>(params, layout, [&](const HeadBlock& work, int number) {
    if constexpr (!Config::kPersistent) load_keys<Config>(params, layout, work);
    ptx::griddepcontrol_wait();    // lse, delta and the zeroed accumulator come from the kernel before
    ptx::griddepcontrol_launch();  // and are there for the kernel after this one, too
    produce_key_block<Config>(params, layout, work, number, self);
  });
}

}  // namespace cuflash
