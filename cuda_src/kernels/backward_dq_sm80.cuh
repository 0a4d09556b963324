// Gradient of the queries without atomics: bitwise the same on every run. Every GPU since Ampere.
#pragma once
#include "attention/gradient.cuh"
#include "attention/masks/mask.cuh"
#include "attention/params_backward.cuh"
#include "attention/sequence.cuh"
#include "ptx/barrier.cuh"
#include "tile/copy.cuh"
#include "tile/finite.cuh"
#include "tile/gemm.cuh"
#include "tile/store.cuh"
#include "tile/zip.cuh"

namespace cuflash {

template <class Config>
struct BackwardDqLayout {
  using Element = typename Config::Element;
  static constexpr int kDepth = tile::Operand<Element>::kDepth;
  static constexpr int kThreads = Config::kWarps * 32;
  static constexpr int kRowTiles = Config::kBlockQ / Config::kWarps / 16;
  static_assert(kRowTiles * 16 * Config::kWarps == Config::kBlockQ, "a warp owns whole tiles of 16 queries");
  static_assert(Config::kBlockK % 16 == 0, "keys come in whole tiles");
  static_assert(Config::kStages == 1 || Config::kStages == 2, "one buffer each for keys and values, or two");

  using QTile = tile::SharedTile<Element, Config::kBlockQ, Config::kHeadDim>;
  using DOutTile = tile::SharedTile<Element, Config::kBlockQ, Config::kHeadDimV>;
  using KTile = tile::SharedTile<Element, Config::kBlockK, Config::kHeadDim>;
  using VTile = tile::SharedTile<Element, Config::kBlockK, Config::kHeadDimV>;
  template <class Tile>
  using Copy = tile::TileCopy<Tile, kThreads, Config::kCopyBytes, Config::kPartialDims>;

  // Bytes from the start of shared memory; queries, and later their gradient, start at 0.
  static constexpr int kDOut = QTile::kBytes;
  static constexpr int kStage = kDOut + DOutTile::kBytes;
  static constexpr int kValues = KTile::kBytes;  // within a stage
  static constexpr int kStageBytes = kValues + VTile::kBytes;
  static constexpr int kSharedBytes = kStage + Config::kStages * kStageBytes;
};

// One block of queries of one head, against all keys that it sees, in order. Warps split the queries; dQ stays in
// registers from the first key to the last.
template <class Config>
struct BackwardDqBlock {
  using Layout = BackwardDqLayout<Config>;
  using Element = typename Config::Element;
  using Mask = typename Config::Mask;
  using Score = typename Config::Score;
  using Params = BackwardParams<Mask, Score>;
  static_assert(IsMask<Mask> && IsScore<Score>);
  static constexpr int kBlockQ = Config::kBlockQ;
  static constexpr int kBlockK = Config::kBlockK;
  static constexpr int kDepth = Layout::kDepth;
  static constexpr int kWarpRows = Layout::kRowTiles * 16;
  using Pairs = tile::Accumulator<Layout::kRowTiles, kBlockK / 8>;
  // float32 steps that share a sum: dq leaves few registers, the fewer where unseen pairs need care.
  static constexpr int kMost = Config::kHeadDim <= 128 ? tile::kMostTogether : Mask::kUniform ? 2 : 1;

  const Params& params;
  const BlockPosition position;
  const uint32_t shared;
  const int first_row;       // of the block
  const int warp_first_row;  // of the warp, in the block
  const Range keys;          // that any query of the block sees
  const Range full_keys;     // that each of them sees
  const typename Score::Head head;
  const typename Layout::template Copy<typename Layout::KTile> k_copy;
  const typename Layout::template Copy<typename Layout::VTile> v_copy;
  float row_base[Pairs::kLaneRows];
  float delta[Pairs::kLaneRows];
  tile::Accumulator<Layout::kRowTiles, Config::kHeadDim / 8> dq;

  CUFLASH_DEVICE BackwardDqBlock(const Params& params, const BlockPosition& position)
      : params(params),
        position(position),
        shared(ptx::dynamic_shared()),
        first_row(position.row_block * kBlockQ),
        warp_first_row(static_cast<int>(ptx::warp_index()) * kWarpRows),
        keys(Mask::key_range(params.mask, first_row, last_row(), params.seqlen_k)),
        full_keys(Mask::full_key_range(params.mask, first_row, last_row(), params.seqlen_k)),
        head(Score::head(params.score, position.head, position.batch)),
        k_copy(head_of<Element>(params.k, params.k_strides, position.batch, kv_head()), params.k_strides.row,
               params.k_strides.dim, params.head_dim),
        v_copy(head_of<Element>(params.v, params.v_strides, position.batch, kv_head()), params.v_strides.row,
               params.v_strides.dim, params.head_dim_v) {}

  CUFLASH_DEVICE int last_row() const { return ptx::min(first_row + kBlockQ, params.seqlen_q) - 1; }
  CUFLASH_DEVICE int kv_head() const { return position.head / (params.num_q_heads / params.num_kv_heads); }
  // Where float32's dq is widest, addresses are worked out anew in each block of keys: registers are short there.
  CUFLASH_DEVICE static int fresh(int value) {
    return sizeof(Element) == 4 && Config::kHeadDim > 128 ? ptx::opaque(value) : value;
  }
  CUFLASH_DEVICE uint32_t stage_smem(int stage) const {
    return fresh(shared) + Layout::kStage + stage * Layout::kStageBytes;
  }

  CUFLASH_DEVICE void load_queries() {
    using QCopy = typename Layout::template Copy<typename Layout::QTile>;
    using DOutCopy = typename Layout::template Copy<typename Layout::DOutTile>;
    QCopy(head_of<Element>(params.q, params.q_strides, position.batch, position.head), params.q_strides.row,
          params.q_strides.dim, params.head_dim)
        .load_between(shared, first_row, 0, params.seqlen_q);
    DOutCopy(head_of<Element>(params.d_out, params.d_out_strides, position.batch, position.head),
             params.d_out_strides.row, params.d_out_strides.dim, params.head_dim_v)
        .load_between(shared + Layout::kDOut, first_row, 0, params.seqlen_q);
    // The statistics are padded to whole blocks of every kernel that reads them.
    const int64_t first_stat =
        (static_cast<int64_t>(position.batch) * params.num_q_heads + position.head) * params.stat_rows + first_row +
        warp_first_row;
#pragma unroll
    for (int row = 0; row < Pairs::kLaneRows; ++row) {
      row_base[row] = ptx::load_global<float>(params.row_base + first_stat + Pairs::row_of(row));
      delta[row] = ptx::load_global<float>(params.delta + first_stat + Pairs::row_of(row));
    }
  }

  CUFLASH_DEVICE void load_keys(int k_block, int stage) const {
    const int first_key = fresh(k_block * kBlockK);
    k_copy.load_between(stage_smem(stage), first_key, 0, params.seqlen_k);
    v_copy.load_between(stage_smem(stage) + Layout::kValues, first_key, 0, params.seqlen_k);
  }

  // Waits for this thread's copies and for all threads. Returns whether dQ = dS K needs care: an unseen pair has
  // dS = 0, and 0 * NaN from its key would reach the query. Care drops what is not finite from the keys: pairs that see
  // such a key have a dS that is not finite already, from lse.
  CUFLASH_DEVICE bool wait_for_keys(int stage, bool is_masked) const {
    ptx::cp_async_wait<0>();
    if constexpr (!Mask::kUniform) {
      if (is_masked) return ptx::sync_cta_or(k_copy.has_nonfinite(stage_smem(stage)));
    }
    ptx::sync_cta();
    return false;
  }

  // In place: scores become P, and d_probs dS. What is not seen is selected away, whatever it holds.
  template <bool kMasked>
  CUFLASH_DEVICE void make_gradients(Pairs& scores, Pairs& d_probs, int k_block) const {
    tile::zip(scores, d_probs, [&](float& score, float& d_prob, int lane_row, int row, int col) {
      const int q = first_row + warp_first_row + row;
      const int k = k_block * kBlockK + col;
      const PairGradient gradient = gradient_of_pair<Score, Element>(
          head, params.softmax_unit, params.pre_scale, score, d_prob, row_base[lane_row], delta[lane_row], q, k);
      const bool keeps = !kMasked || (k < params.seqlen_k && Mask::keeps(params.mask, q, k));
      d_prob = keeps ? gradient.d_score : 0.0f;
    });
  }

  // dQ += dS K.
  template <bool kCareful>
  CUFLASH_DEVICE void accumulate(const Pairs& d_scores, uint32_t stage) {
    tile::gemm<Element, kBlockK / kDepth, tile::Values::kAny, tile::Chain::kLong, kBlockK / kDepth, kMost>(
        dq, [&](int m, int step) { return d_scores.template fragment<Element>(m, step); },
        tile::guarded<kCareful>(tile::BColumnReader<typename Layout::KTile>(stage)));
  }

  CUFLASH_DEVICE void take_keys(int k_block, uint32_t stage, bool is_masked, bool is_careful) {
    Pairs scores, d_probs;
    scores.clear();
    tile::gemm<Element, Config::kHeadDim / kDepth, tile::Values::kAny, tile::Chain::kLong, tile::kScoreUnroll, kMost>(
        scores, tile::AReader<typename Layout::QTile>(shared, warp_first_row),
        tile::BReader<typename Layout::KTile>(stage));
    d_probs.clear();
    tile::gemm<Element, Config::kHeadDimV / kDepth, tile::Values::kAny, tile::Chain::kLong, tile::kScoreUnroll, kMost>(
        d_probs, tile::AReader<typename Layout::DOutTile>(shared + Layout::kDOut, warp_first_row),
        tile::BReader<typename Layout::VTile>(stage + Layout::kValues));
    if (is_masked) {
      make_gradients<true>(scores, d_probs, k_block);
    } else {
      make_gradients<false>(scores, d_probs, k_block);
    }
    if (is_careful) {
      accumulate<true>(d_probs, stage);
    } else {
      accumulate<false>(d_probs, stage);
    }
  }

  CUFLASH_DEVICE void run() {
    dq.clear();
    if (keys.is_empty()) return;
    const int end_block = tile::ceil_div(keys.end, kBlockK);
    int k_block = keys.begin / kBlockK;
    int stage = 0;
    load_queries();
    load_keys(k_block, stage);
    ptx::cp_async_commit();
#pragma unroll 1
    for (; k_block < end_block; ++k_block) {
      const int first_key = k_block * kBlockK;
      const bool is_masked = first_key < full_keys.begin || first_key + kBlockK > full_keys.end;
      const bool is_careful = wait_for_keys(stage, is_masked);
      if constexpr (Config::kStages == 2) {
        // The other stage was read before the wait.
        if (k_block + 1 < end_block) load_keys(k_block + 1, stage ^ 1);
        ptx::cp_async_commit();
      }
      take_keys(k_block, stage_smem(stage), is_masked, is_careful);
      if constexpr (Config::kStages == 2) {
        stage ^= 1;
      } else {
        ptx::sync_cta();  // all warps have read the keys and values that the next ones replace
        if (k_block + 1 < end_block) load_keys(k_block + 1, stage);
        ptx::cp_async_commit();
      }
    }
  }

  // `place` is the block's position, worked out anew: nothing of it needs a register while keys are visited.
  CUFLASH_DEVICE void store(const BlockPosition& place) {
    const int first = place.row_block * kBlockQ;
    dq.for_each([&](float& value, int, int, int) { value *= params.grad_scale; });
    // The warp alone has read these rows of the queries, whose place their gradient takes.
    ptx::sync_warp();
    tile::put<typename Layout::QTile>(shared, warp_first_row, dq);
    ptx::sync_warp();  // the warp's rows are in place; no other warp reads them
    Element* dq_gmem = head_of<Element>(params.dq, params.dq_strides, place.batch, place.head) +
                       first * params.dq_strides.row;
    tile::store_rows<typename Layout::QTile, kWarpRows, Config::kStoreBytes>(
        shared, warp_first_row, dq_gmem, params.dq_strides.row, params.dq_strides.dim,
        ptx::min(kBlockQ, params.seqlen_q - first), params.head_dim);
  }
};

// Which block of queries of which head. Rows that see more keys than others go first.
template <class Config, class Params>
CUFLASH_DEVICE BlockPosition backward_dq_position(const Params& params, uint32_t block_index) {
  if constexpr (Config::Mask::kGrows) {
    constexpr int kBytes = (Config::kHeadDim + Config::kHeadDimV) * sizeof(typename Config::Element);
    const int batch_heads = params.batch * params.num_q_heads;
    return position_longest_first(
        block_index, params.num_q_blocks, params.num_q_heads, batch_heads,
        heads_per_section<kBytes>(params.seqlen_k, params.num_q_heads / params.num_kv_heads, batch_heads));
  } else {
    return position_by_head(block_index, params.num_q_blocks, params.num_q_heads);
  }
}

template <class Config>
CUFLASH_DEVICE void backward_dq_sm80(const BackwardParams<typename Config::Mask, typename Config::Score>& params) {
  BackwardDqBlock<Config> block(params, backward_dq_position<Config>(params, ptx::block_index()));
  block.run();
  block.store(backward_dq_position<Config>(params, ptx::block_index_again()));
}

}  // namespace cuflash
