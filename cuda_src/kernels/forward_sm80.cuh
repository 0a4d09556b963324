// Forward attention on mma.sync and cp.async: every GPU since Ampere.
#pragma once
#include "attention/masks/mask.cuh"
#include "attention/params.cuh"
#include "attention/scores/score.cuh"
#include "attention/softmax.cuh"
#include "kernels/forward_sm80_layout.cuh"
#include "ptx/barrier.cuh"
#include "tile/nonfinite.cuh"
#include "tile/store.cuh"

namespace cuflash {

// One block of queries of one head of one batch. Warps share keys and values and split the rows, so that a row's
// softmax never leaves its warp. Blocks of keys are visited from the last to the first: the ones that need masking come
// first under causal masks, and a window's other edge comes last.
template <class Config>
struct ForwardBlock {
  using Layout = ForwardLayout<Config>;
  using Element = typename Config::Element;
  using Mask = typename Config::Mask;
  using Score = typename Config::Score;
  using Params = ForwardParams<Mask, Score>;
  static_assert(IsMask<Mask> && IsScore<Score>);
  static constexpr int kBlockK = Config::kBlockK;
  static constexpr int kDepth = Layout::kDepth;
  using Out = tile::Accumulator<Layout::kRowTiles, Config::kHeadDimV / 8>;
  using Scores = tile::Accumulator<Layout::kRowTiles, kBlockK / 8>;
  static constexpr int kLaneRows = Scores::kLaneRows;

  const Params& params;
  const BlockPosition position;
  const uint32_t shared;
  const int first_row;       // of the block
  const int warp_first_row;  // of the warp, in the block
  const Range keys;          // that any row of the block sees
  const typename Score::Head head;
  const typename Layout::template Copy<typename Layout::KTile> k_copy;
  const typename Layout::template Copy<typename Layout::VTile> v_copy;
  const tile::AReader<typename Layout::QTile> q_reader;
  const tile::BReader<typename Layout::KTile> k_reader;
  const tile::BColumnReader<typename Layout::VTile> v_reader;
  tile::Fragment<Element> q_frag[Layout::kQueryInRegisters ? Layout::kRowTiles : 1]
                                [Layout::kQueryInRegisters ? Config::kHeadDim / kDepth : 1];
  Out out;  // [warp's rows, head_dim_v], times the row's sum and 2^base
  OnlineSoftmax<kLaneRows> softmax;
  static constexpr int kSteps = kBlockK / kDepth;     // of the product with V
  tile::Fragment<Element> probs[Layout::kRowTiles][kSteps];  // [warp's rows, kBlockK] for that product

  CUFLASH_DEVICE ForwardBlock(const Params& params, const BlockPosition& position)
      : params(params),
        position(position),
        shared(ptx::dynamic_shared()),
        first_row(position.row_block * Config::kBlockQ),
        warp_first_row(static_cast<int>(ptx::warp_index()) * Layout::kWarpRows),
        keys(Mask::key_range(params.mask, first_row, last_row(), params.seqlen_k)),
        head(Score::head(params.score, position.head, position.batch)),
        k_copy(head_of<Element>(params.k, params.k_strides, position.batch, kv_head()), params.k_strides.row,
               params.k_strides.dim, params.head_dim),
        v_copy(head_of<Element>(params.v, params.v_strides, position.batch, kv_head()), params.v_strides.row,
               params.v_strides.dim, params.head_dim_v),
        q_reader(shared, warp_first_row),
        k_reader(shared + Layout::kKeys),
        v_reader(shared + Layout::kValues) {}

  CUFLASH_DEVICE int last_row() const { return ptx::min(first_row + Config::kBlockQ, params.seqlen_q) - 1; }
  CUFLASH_DEVICE int kv_head() const { return position.head / (params.num_q_heads / params.num_kv_heads); }
  CUFLASH_DEVICE static int stage_of(int k_block) { return Config::kStages == 1 ? 0 : k_block % 2; }
  // Addresses of float32 operands are worked out anew in each block of keys: registers are short there.
  CUFLASH_DEVICE static int fresh(int bytes) { return Layout::kInHaste ? ptx::opaque(bytes) : bytes; }
  CUFLASH_DEVICE uint32_t k_smem(int k_block) const {
    return shared + Layout::kKeys + stage_of(k_block) * Layout::KTile::kBytes;
  }
  CUFLASH_DEVICE uint32_t v_smem(int k_block) const {
    return shared + Layout::kValues + stage_of(k_block) * Layout::VTile::kBytes;
  }

  CUFLASH_DEVICE void load_queries() const {
    const typename Layout::template Copy<typename Layout::QTile> q_copy(
        head_of<Element>(params.q, params.q_strides, position.batch, position.head), params.q_strides.row,
        params.q_strides.dim, params.head_dim);
    q_copy.load_between(shared, first_row, 0, params.seqlen_q);
  }

  // Keys or values of one block. Rows that no query of this block sees become zeros: they may hold anything.
  template <bool kMasked, class Copy>
  CUFLASH_DEVICE void load(const Copy& copy, uint32_t tile_smem, int k_block) const {
    const int first_key = k_block * kBlockK;
    if (kMasked || (Mask::kHasLowerEdge && first_key < keys.begin)) {
      copy.load_between(tile_smem, first_key, keys.begin, keys.end);
    } else {
      copy.load(tile_smem, first_key);
    }
  }

  // Waits for this thread's copies and for all threads. Returns whether the values hold NaN or infinity where it
  // matters: a row that does not see such a value has probability 0 there, and 0 * NaN would reach it through the
  // product. Blocks that every row sees need no look, nor do masks under which all rows see the same keys: there unseen
  // values are zeros.
  template <bool kMasked>
  CUFLASH_DEVICE bool wait_for_values(int k_block) const {
    ptx::cp_async_wait<0>();
    if constexpr (kMasked && Layout::kLooksAtValues) {
      return ptx::sync_cta_or(v_copy.has_nonfinite(v_smem(k_block)));
    } else {
      ptx::sync_cta();
      return false;
    }
  }

  // S = Q K^T, then score function and mask.
  template <bool kMasked>
  CUFLASH_DEVICE void make_scores(int k_block, Scores& scores) const {
    scores.clear();
    const auto keys_of_stage = k_reader.moved(fresh(stage_of(k_block) * Layout::KTile::kBytes));
    const auto queries = q_reader.moved(fresh(0));
    tile::gemm<Element, Config::kHeadDim / kDepth, Layout::template kFactors<kMasked>, tile::Chain::kLong,
               tile::kScoreUnroll>(
        scores,
        [&](int m, int step) {
          if constexpr (Layout::kQueryInRegisters) return q_frag[m][step];
          else return queries(m, step);
        },
        keys_of_stage);
    if constexpr (Score::kPreScale) apply_score(k_block, scores);
    if constexpr (kMasked) apply_mask(k_block, scores);
  }

  CUFLASH_DEVICE void apply_score(int k_block, Scores& scores) const {
    // Opaque, or all that depends on positions alone would wait in registers for a second pass over the block.
    const int lane_key = ptx::opaque(k_block * kBlockK + Scores::first_col());
#pragma unroll
    for (int n = 0; n < Scores::kColTiles; ++n) {
      ptx::sync_warp();  // bounds what the compiler works on at once: registers are short here
#pragma unroll
      for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) {
        const int q = first_row + warp_first_row + Scores::row_of(lane_row);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores.values[lane_row / 2][n][lane_row % 2 * 2 + i];
          score = Score::apply(head, score * params.pre_scale, q, {lane_key, n * 8 + i});
        }
      }
    }
  }

  // Unseen scores become -inf: by selection, so that whatever an unseen key holds stays behind. What a row sees is an
  // interval, taken relative to the lane's first column: then each comparison is with a number in the instruction.
  CUFLASH_DEVICE void apply_mask(int k_block, Scores& scores) const {
    const int lane_key = k_block * kBlockK + Scores::first_col();
#pragma unroll
    for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) {
      const int q = first_row + warp_first_row + Scores::row_of(lane_row);
      const Range seen = Mask::key_range(params.mask, q, q, params.seqlen_k);
      const int begin = seen.begin - lane_key, end = seen.end - lane_key;
#pragma unroll
      for (int n = 0; n < Scores::kColTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores.values[lane_row / 2][n][lane_row % 2 * 2 + i];
          const int col = n * 8 + i;
          score = col < end && (!Mask::kHasLowerEdge || col >= begin) ? score : -kInfinity;
        }
      }
    }
  }

  // Moves the bases of the warp's rows if one of them is outgrown.
  CUFLASH_DEVICE void follow_maximum(Scores& scores) {
    const float unit = params.softmax_unit;
    float row_max[kLaneRows];
    bool is_outgrown = false;
#pragma unroll
    for (int row = 0; row < kLaneRows; ++row) row_max[row] = -kInfinity;
    scores.for_each([&](float& score, int row, int, int) { row_max[row] = tile::larger(row_max[row], score); });
#pragma unroll
    for (int row = 0; row < kLaneRows; ++row) is_outgrown |= softmax.is_outgrown(row, row_max[row] * unit);
    if (!ptx::vote_any(is_outgrown)) return;
#pragma unroll
    for (int row = 0; row < kLaneRows; ++row) {
      out.scale_row(row, softmax.raise_base(row, tile::quad_max(row_max[row]) * unit));
    }
  }

  // P = softmax numerators of one block, from scores to operands; adds to the row sums. Blocks that are masked, and the
  // first of a row, look up their maximum. Others do without, and are done again if a base is too low, which is rare.
  template <bool kMasked>
  CUFLASH_DEVICE void make_probabilities(int k_block) {
    float part[kLaneRows];
    for (bool looks_up = kMasked || ptx::vote_any(softmax.base[0] == kNoBase);; looks_up = true) {
      Scores scores;
      make_scores<kMasked>(k_block, scores);
      if (looks_up) follow_maximum(scores);
#pragma unroll
      for (int row = 0; row < kLaneRows; ++row) part[row] = 0.0f;
      const float unit = settle_unit(scores, softmax, params.softmax_unit);
      scores.for_each([&](float& value, int row, int, int) {
        value = probability(value, unit, softmax.base[row]);
        // float32: the sum takes what the product with V will take, so that equal values come back as they are.
        if constexpr (sizeof(Element) == 4) value = tile::Operand<Element>::nearest(value);
        part[row] += value;
      });
#pragma unroll
      for (int m = 0; m < Layout::kRowTiles; ++m) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) probs[m][step] = scores.template fragment<Element>(m, step);
      }
      if (looks_up) break;
      bool is_low = false;
#pragma unroll
      for (int row = 0; row < kLaneRows; ++row) is_low |= !(part[row] <= kSumLimit<Mask>);  // an overflow may be NaN
      if (!ptx::vote_any(is_low)) break;
    }
#pragma unroll
    for (int row = 0; row < kLaneRows; ++row) softmax.sum[row] += part[row];
  }

  // O += P V.
  template <bool kMasked>
  CUFLASH_DEVICE void accumulate(int k_block, bool has_nonfinite) {
    const auto values_of_stage = v_reader.moved(fresh(stage_of(k_block) * Layout::VTile::kBytes));
    if (kMasked && Layout::kLooksAtValues && has_nonfinite) {
      tile::add_nonfinite<Element, kSteps>(out, values_of_stage, [&](int row, int col) {
        return Mask::keeps(params.mask, first_row + warp_first_row + row, k_block * kBlockK + col);
      });
      ptx::sync_cta();  // all warps have read what is not finite
      v_copy.clear_nonfinite(v_smem(k_block));
      ptx::sync_cta();  // what remains is finite
    }
    tile::gemm<Element, kSteps, Layout::template kFactors<kMasked>>(
        out, [&](int m, int step) { return probs[m][step]; }, values_of_stage);
  }

  // One block of keys. With one stage, values arrive while scores are made and the next keys while values are used.
  template <bool kMasked>
  CUFLASH_DEVICE void step(int k_block, int first_block) {
    bool has_nonfinite;
    if constexpr (Config::kStages == 1) {
      ptx::cp_async_wait<0>();
      ptx::sync_cta();  // these keys are in place, and all warps have read the values that the next ones replace
      load<kMasked>(v_copy, v_smem(k_block), k_block);
      ptx::cp_async_commit();
      make_probabilities<kMasked>(k_block);
      has_nonfinite = wait_for_values<kMasked>(k_block);  // and all warps have read the keys that the next ones replace
      if (k_block > first_block) load<kMasked>(k_copy, k_smem(k_block - 1), k_block - 1);
      ptx::cp_async_commit();
    } else {
      // This stage is in place, and all warps have read the other one, which the next copies replace.
      has_nonfinite = wait_for_values<kMasked>(k_block);
      if (k_block > first_block) {
        load<kMasked>(k_copy, k_smem(k_block - 1), k_block - 1);
        load<kMasked>(v_copy, v_smem(k_block - 1), k_block - 1);
      }
      ptx::cp_async_commit();
      make_probabilities<kMasked>(k_block);
    }
    accumulate<kMasked>(k_block, has_nonfinite);
  }

  // A block of float32 rows whose output has a NaN is done again with every block of keys masked: those are multiplied
  // with care.
  CUFLASH_DEVICE void run() {
    bool is_careful = false;
    while (true) {
      visit_keys(is_careful);
      if (!Layout::kInHaste || is_careful) break;
      is_careful = ptx::sync_cta_or(tile::has_nan(out));  // and all warps have read the tiles that are loaded again
      if (!is_careful) break;
    }
  }

  CUFLASH_DEVICE void visit_keys(bool is_careful) {
    out.clear();
    softmax.clear();
    if (keys.is_empty()) return;
    const int first_block = keys.begin / kBlockK;
    const int end_block = tile::ceil_div(keys.end, kBlockK);
    const Range full = Mask::full_key_range(params.mask, first_row, last_row(), params.seqlen_k);
    int full_begin = ptx::max(tile::ceil_div(full.begin, kBlockK), first_block);
    int full_end = ptx::min(full.end / kBlockK, end_block);
    if ((Layout::kInHaste && is_careful) || full_begin >= full_end) full_begin = full_end = first_block;

    load_queries();
    int k_block = end_block - 1;
    load<true>(k_copy, k_smem(k_block), k_block);
    if constexpr (Config::kStages == 2) load<true>(v_copy, v_smem(k_block), k_block);
    ptx::cp_async_commit();
    if constexpr (Layout::kQueryInRegisters) {
      ptx::cp_async_wait<0>();
      ptx::sync_cta();  // queries are in place
#pragma unroll
      for (int m = 0; m < Layout::kRowTiles; ++m) {
#pragma unroll
        for (int step = 0; step < Config::kHeadDim / kDepth; ++step) q_frag[m][step] = q_reader(m, step);
      }
    }

    // Masked blocks, then full ones; a window has masked ones again, which a second round takes with the same code.
    int masked_end = full_end;
#pragma unroll 1
    while (true) {
#pragma unroll 1
      for (; k_block >= masked_end; --k_block) step<true>(k_block, first_block);
      if (k_block < first_block) break;
#pragma unroll 1
      for (; k_block >= full_begin; --k_block) step<false>(k_block, first_block);
      if (!Mask::kHasLowerEdge) break;
      masked_end = first_block;
    }
  }

  // Divides by the row sums and writes the output and the logarithms of the sums. `place` is the block's position,
  // worked out anew: nothing of it needs a register while keys are visited.
  CUFLASH_DEVICE void store(const BlockPosition& place) {
    const int first = place.row_block * Config::kBlockQ;
    const int rows = ptx::min(Config::kBlockQ, params.seqlen_q - first);
    const int64_t head = static_cast<int64_t>(place.batch) * params.num_q_heads + place.head;
    float* lse_gmem = params.lse + head * params.seqlen_q + first;
#pragma unroll
    for (int lane_row = 0; lane_row < kLaneRows; ++lane_row) {
      const float sum = tile::quad_sum(softmax.sum[lane_row]);
      const float inverse = normalizer(sum);
      if constexpr (sizeof(Element) == 4) {
        out.for_row(lane_row, [&](float& value) { value = quotient(value, sum, inverse); });
      } else {
        out.scale_row(lane_row, inverse);
      }
      const int row = warp_first_row + Out::row_of(lane_row);
      if (tile::leads_quad() && row < rows) {
        ptx::store_global(lse_gmem + row, log_sum_exp(softmax.base[lane_row], sum));
      }
    }
    ptx::sync_cta();  // all warps have read queries, keys and values, whose place the output takes
    tile::put<typename Layout::OutTile>(shared, warp_first_row, out);
    ptx::sync_warp();  // the warp's rows are in place; no other warp reads them
    Element* out_gmem = head_of<Element>(params.out, params.out_strides, place.batch, place.head) +
                        first * params.out_strides.row;
    tile::store_rows<typename Layout::OutTile, Layout::kWarpRows, Config::kStoreBytes>(
        shared, warp_first_row, out_gmem, params.out_strides.row, params.out_strides.dim, rows, params.head_dim_v);
  }
};

template <class Config>
CUFLASH_DEVICE void forward_sm80(const ForwardParams<typename Config::Mask, typename Config::Score>& params) {
  ForwardBlock<Config> block(params, forward_position<Config>(params, ptx::block_index()));
  block.run();
  block.store(forward_position<Config>(params, ptx::block_index_again()));
}

}  // namespace cuflash
