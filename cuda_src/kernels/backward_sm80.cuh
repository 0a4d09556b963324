// Gradients of keys, values and (unless deterministic) queries on mma.sync and cp.async: every GPU since Ampere.
#pragma once
#include "attention/gradient.cuh"
#include "attention/params_backward.cuh"
#include "attention/sequence.cuh"
#include "kernels/backward_sm80_layout.cuh"
#include "ptx/barrier.cuh"
#include "tile/column_numbers.cuh"
#include "tile/store.cuh"
#include "tile/zip.cuh"

namespace cuflash {

// One block of keys of one key head, against all queries that see it: those of every query head of the group. Scores
// are made transposed, keys in rows, so that P^T and dS^T are left operands of dV = P^T dO and dK = dS^T Q as they are.
// dK and dV stay in registers from the first query to the last.
template <class Config>
struct BackwardBlock {
  using Layout = BackwardLayout<Config>;
  using Element = typename Config::Element;
  using Mask = typename Config::Mask;
  using Score = typename Config::Score;
  using Params = BackwardParams<Mask, Score>;
  static_assert(IsMask<Mask> && IsScore<Score>);
  static constexpr int kBlockQ = Config::kBlockQ;
  static constexpr int kBlockK = Config::kBlockK;
  static constexpr int kDepth = Layout::kDepth;
  static constexpr int kWarpsD = Layout::kWarpsD;
  static constexpr int kWarpKeys = Layout::kRowTiles * 16;
  using Pairs = tile::Accumulator<Layout::kRowTiles, Layout::kPartQ / 8>;
  using Reduction = tile::ReductionTile<Config::kReduceWidth>;

  // Queries of one head that come together.
  struct Step {
    int head_in_group, q_block;
  };

  const Params& params;
  const BlockPosition position;  // a block of keys, a key head, a batch
  const uint32_t shared;
  const int first_key;
  const int group;     // query heads that share this key head
  const int warp_key;  // first of the warp's keys, in the block
  const int warp_d;    // the warp's turn among those that share its keys
  const Range queries;
  typename Score::Head head;
  bool keys_nonfinite = false;  // whether this thread has copied a key that is not finite
  tile::Accumulator<Layout::kRowTiles, Config::kHeadDim / kWarpsD / 8> dk;
  tile::Accumulator<Layout::kRowTiles, Config::kHeadDimV / kWarpsD / 8> dv;

  CUFLASH_DEVICE BackwardBlock(const Params& params, const BlockPosition& position)
      : params(params),
        position(position),
        shared(ptx::dynamic_shared()),
        first_key(position.row_block * kBlockK),
        group(params.num_q_heads / params.num_kv_heads),
        warp_key(static_cast<int>(ptx::warp_index()) % Layout::kWarpsK * kWarpKeys),
        warp_d(Layout::kInRegisters ? 0 : static_cast<int>(ptx::warp_index()) / Layout::kWarpsK),
        queries(Mask::query_range(params.mask, first_key, last_key(), params.seqlen_q)) {}

  CUFLASH_DEVICE int last_key() const { return ptx::min(first_key + kBlockK, params.seqlen_k) - 1; }
  CUFLASH_DEVICE int q_head(const Step& step) const { return position.head * group + step.head_in_group; }
  CUFLASH_DEVICE uint32_t stage_smem(int stage) const { return shared + Layout::kStage + stage * Layout::kStageBytes; }

  template <class Tile>
  CUFLASH_DEVICE typename Layout::template Copy<Tile> copy_of(const void* array, const Strides& strides, int head,
                                                              int cols) const {
    return {head_of<Element>(array, strides, position.batch, head), strides.row, strides.dim, cols};
  }
  CUFLASH_DEVICE auto k_copy() const {
    return copy_of<typename Layout::KTile>(params.k, params.k_strides, position.head, params.head_dim);
  }
  CUFLASH_DEVICE auto q_copy(const Step& step) const {
    return copy_of<typename Layout::QTile>(params.q, params.q_strides, q_head(step), params.head_dim);
  }
  CUFLASH_DEVICE auto d_out_copy(const Step& step) const {
    return copy_of<typename Layout::DOutTile>(params.d_out, params.d_out_strides, q_head(step), params.head_dim_v);
  }

  CUFLASH_DEVICE void load_keys() const {
    k_copy().load_between(shared, first_key, 0, params.seqlen_k);
    copy_of<typename Layout::VTile>(params.v, params.v_strides, position.head, params.head_dim_v)
        .load_between(shared + Layout::kValues, first_key, 0, params.seqlen_k);
  }

  // Queries, gradients of their outputs, lse and delta. The statistics are padded to whole blocks.
  CUFLASH_DEVICE void load_queries(const Step& step, int stage) const {
    const uint32_t stage_address = stage_smem(stage);
    const int first_row = step.q_block * kBlockQ;
    q_copy(step).load_between(stage_address, first_row, 0, params.seqlen_q);
    d_out_copy(step).load_between(stage_address + Layout::kDOut, first_row, 0, params.seqlen_q);
    const int64_t first_stat =
        (static_cast<int64_t>(position.batch) * params.num_q_heads + q_head(step)) * params.stat_rows + first_row;
    tile::copy_floats<kBlockQ, Layout::kThreads>(stage_address + Layout::kLse, params.row_base + first_stat);
    tile::copy_floats<kBlockQ, Layout::kThreads>(stage_address + Layout::kDelta, params.delta + first_stat);
  }

  // Whether some query of the block does not see some key of the block. Queries past the end see nothing, but their
  // zeros and their lse of +inf make them harmless without a mask (store() answers for keys that are not finite).
  CUFLASH_DEVICE bool is_masked(const Step& step) const {
    const int first_row = step.q_block * kBlockQ;
    const int first = ptx::opaque(first_key);  // worked out anew at each step: sums leave no registers to keep it
    const int last = ptx::min(first + kBlockK, params.seqlen_k) - 1;
    const Range full = Mask::full_query_range(params.mask, first, last, params.seqlen_q);
    return first + kBlockK > params.seqlen_k || first_row < full.begin ||
           ptx::min(first_row + kBlockQ, params.seqlen_q) > full.end;
  }

  // S^T = K Q^T and dP^T = V dO^T of one part of the queries.
  CUFLASH_DEVICE void make_scores(Pairs& scores, Pairs& d_probs, uint32_t stage, int first_col) const {
    scores.clear();
    tile::gemm<Element, Config::kHeadDim / kDepth, tile::Values::kAny, tile::Chain::kLong, tile::kScoreUnroll>(
        scores, tile::AReader<typename Layout::KTile>(shared, warp_key),
        tile::BReader<typename Layout::QTile>(stage, first_col));
    d_probs.clear();
    tile::gemm<Element, Config::kHeadDimV / kDepth, tile::Values::kAny, tile::Chain::kLong, tile::kScoreUnroll>(
        d_probs, tile::AReader<typename Layout::VTile>(shared + Layout::kValues, warp_key),
        tile::BReader<typename Layout::DOutTile>(stage + Layout::kDOut, first_col));
  }

  // In place: scores become P^T, and d_probs dS^T. What is not seen is selected away, whatever it holds.
  template <bool kMasked>
  CUFLASH_DEVICE void make_gradients(Pairs& scores, Pairs& d_probs, uint32_t stage, const Step& step,
                                     int first_col) const {
    const int first_q = step.q_block * kBlockQ + first_col;
    tile::zip_columns(
        scores, d_probs, stage + Layout::kLse + first_col * 4, stage + Layout::kDelta + first_col * 4,
        [&](float& score, float& d_prob, float row_base, float delta, int row, int col) {
          const int q = first_q + col;
          const int k = first_key + warp_key + row;
          const PairGradient gradient = gradient_of_pair<Score, Element>(
              head, params.softmax_unit, params.pre_scale, score, d_prob, row_base, delta, q, k);
          const bool keeps = !kMasked || (k < params.seqlen_k && Mask::keeps(params.mask, q, k));
          score = keeps ? gradient.prob : 0.0f;
          d_prob = keeps ? gradient.d_score : 0.0f;
        });
  }

  // dV += P^T dO and dK += dS^T Q, from registers.
  template <bool kCareful>
  CUFLASH_DEVICE void accumulate(const Pairs& probs, const Pairs& d_scores, uint32_t stage, int first_col) {
    using DOutTile = typename Layout::DOutTile;
    using QTile = typename Layout::QTile;
    const tile::BColumnReader<DOutTile> d_out(stage + Layout::kDOut + first_col * DOutTile::kRowBytes);
    const tile::BColumnReader<QTile> q(stage + first_col * QTile::kRowBytes);
    constexpr int kSteps = Layout::kPartQ / kDepth;
    tile::gemm<Element, kSteps>(
        dv, [&](int m, int step) { return probs.template fragment<Element>(m, step); }, tile::guarded<kCareful>(d_out));
    tile::gemm<Element, kSteps>(
        dk, [&](int m, int step) { return d_scores.template fragment<Element>(m, step); }, tile::guarded<kCareful>(q));
  }

  // The same from shared memory, where the warps that share keys have met.
  template <bool kCareful>
  CUFLASH_DEVICE void accumulate_shared(uint32_t stage) {
    using PairReader = tile::AReader<typename Layout::PairTile>;
    using DOutReader = tile::BColumnReader<typename Layout::DOutTile, tile::Depth::kNatural>;
    using QReader = tile::BColumnReader<typename Layout::QTile, tile::Depth::kNatural>;
    const tile::Turns<DOutReader, kWarpsD> d_out(stage + Layout::kDOut, warp_d);
    const tile::Turns<QReader, kWarpsD> q(stage, warp_d);
    constexpr int kSteps = kBlockQ / kDepth;
    tile::gemm<Element, kSteps>(dv, PairReader(shared + Layout::kProbs, warp_key), tile::guarded<kCareful>(d_out));
    tile::gemm<Element, kSteps>(dk, PairReader(shared + Layout::kDScores, warp_key), tile::guarded<kCareful>(q));
  }

  // dQ += dS K into the accumulator in global memory; every block of keys adds its part.
  template <bool kCareful>
  CUFLASH_DEVICE void reduce_dq(const Step& step) const {
    constexpr int kWarpsQ = Layout::kDqWarps.rows, kTurns = Layout::kDqWarps.cols;
    const int warp_q = static_cast<int>(ptx::warp_index()) % kWarpsQ;
    const int warp_col = static_cast<int>(ptx::warp_index()) / kWarpsQ;
    if (kWarpsQ * kTurns < Config::kWarps && warp_col >= kTurns) return;
    tile::Accumulator<kBlockQ / 16 / kWarpsQ, Config::kHeadDim / 8 / kTurns> dq;
    dq.clear();
    constexpr int kSteps = kBlockK / kDepth, kUnroll = kCareful ? 1 : kSteps;  // what is rare need not be long
    tile::gemm<Element, kSteps, tile::Values::kAny, tile::Chain::kShort, kUnroll>(
        dq, tile::Turns<tile::AColumnReader<typename Layout::PairTile>, kWarpsQ>(shared + Layout::kDScores, warp_q),
        tile::guarded<kCareful>(tile::Turns<tile::BColumnReader<typename Layout::KTile>, kTurns>(shared, warp_col)));

    const int row_tiles = tile::ceil_div(params.seqlen_q, Reduction::kRows);
    const int64_t first_tile = (static_cast<int64_t>(position.batch) * params.num_q_heads + q_head(step)) * row_tiles;
#pragma unroll
    for (int m = 0; m < dq.kRowTiles; ++m) {
      const int row_tile = step.q_block * (kBlockQ / 16) + m * kWarpsQ + warp_q;
      if (row_tile >= row_tiles) break;
      float* row_gmem = params.dq_accumulator + (first_tile + row_tile) * (Config::kHeadDim * Reduction::kRows);
#pragma unroll
      for (int n = 0; n < dq.kColTiles; ++n) {
        const int col_tile = (n / 2 * kTurns + warp_col) * 2 + n % 2;
        Reduction::add(row_gmem + col_tile * Reduction::kFloats, dq.values[m][n]);
      }
    }
  }

  // One part of the queries: scores, their gradients, and what becomes of them before the warps meet.
  CUFLASH_DEVICE void make_part(uint32_t stage, const Step& step, bool is_masked, bool is_careful, int first_col) {
    Pairs probs, d_scores;
    make_scores(probs, d_scores, stage, first_col);
    if (is_masked) {
      make_gradients<true>(probs, d_scores, stage, step, first_col);
    } else {
      make_gradients<false>(probs, d_scores, stage, step, first_col);
    }
    if (is_careful) {
      tile::zip(probs, d_scores, [](float& prob, float& d_score, int, int, int) {
        prob = tile::is_finite(d_score) ? prob : d_score;
      });
    }
    if constexpr (Layout::kNeedsDScores) {
      tile::put_turns<typename Layout::PairTile, 1>(shared + Layout::kDScores, warp_key, first_col / 16, d_scores);
    }
    if constexpr (Layout::kInRegisters) {
      if (is_careful) {
        accumulate<true>(probs, d_scores, stage, first_col);
      } else {
        accumulate<false>(probs, d_scores, stage, first_col);
      }
    } else {
      tile::put_turns<typename Layout::PairTile, 1>(shared + Layout::kProbs, warp_key, first_col / 16, probs);
    }
  }

  // Waits for this thread's copies and for all threads. Returns whether the products need care: an unseen pair has
  // P = dS = 0, and 0 * NaN from a row of d_out, q or k would reach gradients that must not know of it. Care drops what
  // is not finite from those rows: pairs that see it have a dS that is not finite already, from lse or delta. Only
  // blocks with unseen pairs need the look.
  CUFLASH_DEVICE bool wait_for_queries(const Step& step, int stage, bool is_masked, bool is_first) {
    ptx::cp_async_wait<0>();
    if constexpr (!Mask::kUniform) {
      if (is_first) keys_nonfinite = k_copy().has_nonfinite(shared);
      if (is_masked) {
        return ptx::sync_cta_or(keys_nonfinite || q_copy(step).has_nonfinite(stage_smem(stage)) ||
                                d_out_copy(step).has_nonfinite(stage_smem(stage) + Layout::kDOut));
      }
    }
    ptx::sync_cta();
    return false;
  }

  // What follows the wait for one step's queries. `load_next` queues the copies of the next step, or nothing.
  template <class LoadNext>
  CUFLASH_DEVICE void take_step(const Step& step, int stage, bool is_masked, bool is_careful, LoadNext load_next) {
    // The other stage was read before the wait.
    if constexpr (Config::kStages == 2) load_next();
    const uint32_t stage_address = stage_smem(stage);
    if constexpr (Layout::kInRegisters) {
      // Two parts at a time hide each other's latency; more would ask for more registers than there are, and so would
      // two whose score function runs into the next one, with no dS put away between them.
      constexpr int kTogether = Score::kPreScale && !Layout::kNeedsDScores && Layout::kParts > 2 ? 1 : 2;
#pragma unroll kTogether
      for (int part = 0; part < Layout::kParts; ++part) {
        make_part(stage_address, step, is_masked, is_careful, part * Layout::kPartQ);
      }
    } else {
      if (warp_d < Layout::kScoreWarps) make_part(stage_address, step, is_masked, is_careful, warp_d * Layout::kPartQ);
      ptx::sync_cta();  // P and dS of all warps are in place
      if (is_careful) {
        accumulate_shared<true>(stage_address);
      } else {
        accumulate_shared<false>(stage_address);
      }
    }
    if constexpr (Config::kStages == 1 || (Layout::kInRegisters && Config::kAccumulateDq)) {
      ptx::sync_cta();  // dS of all warps is in place; queries and d_out have been read and may be overwritten
    }
    if constexpr (Config::kStages == 1) load_next();
    if constexpr (Config::kAccumulateDq) {
      if (is_careful) {
        reduce_dq<true>(step);
      } else {
        reduce_dq<false>(step);
      }
    }
  }

  CUFLASH_DEVICE void run() {
    dk.clear();
    dv.clear();
    if (queries.is_empty()) return;
    const int first_block = queries.begin / kBlockQ;
    const int end_block = tile::ceil_div(queries.end, kBlockQ);
    Step step{0, first_block};
    load_keys();
    load_queries(step, 0);
    ptx::cp_async_commit();
    int stage = 0;
#pragma unroll 1
    while (step.head_in_group < group) {
      const bool is_last_block = step.q_block + 1 == end_block;
      const Step next{step.head_in_group + is_last_block, is_last_block ? first_block : step.q_block + 1};
      if (step.q_block == first_block) head = Score::head(params.score, q_head(step), position.batch);
      const bool masked = is_masked(step);
      const bool is_first = step.head_in_group == 0 && step.q_block == first_block;
      const bool is_careful = wait_for_queries(step, stage, masked, is_first);
      take_step(step, stage, masked, is_careful, [&] {
        if (next.head_in_group < group) load_queries(next, Config::kStages == 2 ? stage ^ 1 : 0);
        ptx::cp_async_commit();
      });
      step = next;
      if constexpr (Config::kStages == 2) stage ^= 1;
    }
  }

  template <class Tile>
  CUFLASH_DEVICE void store_tile(uint32_t tile_smem, void* array, const Strides& strides, int cols) const {
    constexpr int kRows = kBlockK / Config::kWarps;
    const int warp_row = static_cast<int>(ptx::warp_index()) * kRows;
    Element* block_gmem = head_of<Element>(array, strides, position.batch, position.head) + first_key * strides.row;
    tile::store_rows<Tile, kRows, Config::kStoreBytes>(tile_smem, warp_row, block_gmem, strides.row, strides.dim,
                                                       last_key() + 1 - first_key, cols);
  }

  // Whether any query sees a row of the warp's keys. Queries past the end see more by the mask's rule, and 0 * NaN comes
  // of a key that is not finite: one that nobody sees has gradients of zero all the same.
  CUFLASH_DEVICE bool is_seen(int row) const {
    const int k = ptx::opaque(first_key) + warp_key + row;
    return Mask::kUniform || !Mask::query_range(params.mask, k, k, params.seqlen_q).is_empty();
  }

  CUFLASH_DEVICE void store() {
    dk.for_each([&](float& value, int, int row, int) { value = is_seen(row) ? value * params.grad_scale : 0.0f; });
    dv.for_each([&](float& value, int, int row, int) { value = is_seen(row) ? value : 0.0f; });
    ptx::sync_cta();  // all warps have read keys and values, whose place their gradients take
    tile::put_turns<typename Layout::KTile, kWarpsD>(shared, warp_key, warp_d, dk);
    tile::put_turns<typename Layout::VTile, kWarpsD>(shared + Layout::kValues, warp_key, warp_d, dv);
    ptx::sync_cta();  // both gradients are in place
    store_tile<typename Layout::KTile>(shared, params.dk, params.dk_strides, params.head_dim);
    store_tile<typename Layout::VTile>(shared + Layout::kValues, params.dv, params.dv_strides, params.head_dim_v);
  }
};

template <class Config>
CUFLASH_DEVICE void backward_sm80(const BackwardParams<typename Config::Mask, typename Config::Score>& params) {
  BackwardBlock<Config> block(params, backward_position<Config>(params));
  block.run();
  block.store();
}

}  // namespace cuflash
