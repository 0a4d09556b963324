// What the Hopper backward kernels share: which block does what, where a fragment lies, and the pointwise part between
// the products.
#pragma once
#include "attention/masks/mask.cuh"
#include "attention/params_sm90_backward.cuh"
#include "attention/scores/score.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"
#include "tile/pipeline.cuh"
#include "tile/warpgroup_backward.cuh"

namespace cuflash {

// Named barriers of these kernels; id 0 is the whole block. All but the first are counted up by warpgroup or buffer.
enum BackwardSm90Barrier : int {
  kBarrierConsumers = 1,   // both consumer warpgroups
  kBarrierDqFull = 2,      // a warpgroup's part of dq lies in shared memory
  kBarrierDqEmpty = 4,     // that part has been read and may be overwritten
  kBarrierProbsFull = 6,   // probabilities handed from one warpgroup to the other
  kBarrierProbsEmpty = 8,  // and taken
  kBarrierTurn = 10,       // it is this warpgroup's turn to start products
  kBarrierMet = 12,        // the answer where consumers that run different code meet
};

// One block of rows (of keys, or of queries) of one head.
struct HeadBlock {
  int batch, head, block;
};

// Blocks of a head come in order, the first with most work (causal mask, keys). Within a section, block i of all its
// heads precedes block i + 1: long blocks start early and the heads of a section share L2.
CUFLASH_DEVICE HeadBlock head_block_of(int index, int num_blocks, int num_heads, int batch, int heads_per_section) {
  const int section = index / (num_blocks * heads_per_section);
  const int first = section * heads_per_section;
  const int in_section = tile::smaller(heads_per_section, batch * num_heads - first);
  const int rest = index - first * num_blocks;
  const int batch_head = first + rest % in_section;
  return {batch_head / num_heads, batch_head % num_heads, rest / in_section};
}

// Whether each of the rows sees each of the keys, and none of the keys is padding: then nothing need be masked.
template <class Mask>
CUFLASH_DEVICE bool all_visible(const typename Mask::Params& mask, int first_row, int rows, int first_key, int keys,
                                int seqlen_k) {
  const Range full = Mask::full_key_range(mask, first_row, first_row + rows - 1, seqlen_k);
  return full.begin <= first_key && first_key + keys <= full.end;
}

// Query and key of a thread's accumulators. kKeysInRows: the product was keys times queries.
template <bool kKeysInRows>
struct FragmentPlace {
  int first_q, first_k;  // of element 0 of this thread

  CUFLASH_DEVICE int q(int i) const { return first_q + (kKeysInRows ? tile::col_of(i) : 8 * tile::row_of(i)); }
  CUFLASH_DEVICE int k(int i) const { return first_k + (kKeysInRows ? 8 * tile::row_of(i) : tile::col_of(i)); }
};

// What is visible of a thread's accumulators: of each of its two rows one interval of columns, because a query sees an
// interval of keys and a key is seen by an interval of queries. Columns are compile-time numbers: two comparisons each.
template <class Mask, bool kKeysInRows>
struct FragmentMask {
  Range rows[tile::kFragmentRows];  // columns, counted from the thread's first

  template <class Params>
  CUFLASH_DEVICE FragmentMask(const Params& params, const FragmentPlace<kKeysInRows>& place) {
#pragma unroll
    for (int row = 0; row < tile::kFragmentRows; ++row) {
      if constexpr (kKeysInRows) {
        const int k = place.first_k + 8 * row;
        const Range queries = Mask::query_range(params.mask, k, k, params.seqlen_q);
        rows[row] = {queries.begin - place.first_q, k < params.seqlen_k ? queries.end - place.first_q : 0};
      } else {
        const int q = place.first_q + 8 * row;
        const Range keys = Mask::key_range(params.mask, q, q, params.seqlen_k);
        rows[row] = {keys.begin - place.first_k, keys.end - place.first_k};
      }
    }
  }
  CUFLASH_DEVICE bool hides(int i) const {
    const Range& row = rows[tile::row_of(i)];
    return tile::col_of(i) < row.begin || tile::col_of(i) >= row.end;
  }
};

// One number a query (lse, delta) for each element of a fragment: from shared memory where queries run along the
// columns, a pair every eight of them, or from registers where they run along the rows, one for each of the thread's
// two.
struct ColumnStats {
  uint32_t smem;
  CUFLASH_DEVICE explicit ColumnStats(uint32_t block_smem) : smem(block_smem + tile::fragment_col() * 4) {}
  CUFLASH_DEVICE f32x4 of_chunk(int chunk) const {
    const f32x2 pair = ptx::load_shared<f32x2>(smem + chunk * 32);
    return {pair.x, pair.y, pair.x, pair.y};
  }
};
struct RowStats {
  float upper, lower;
  CUFLASH_DEVICE f32x4 of_chunk(int) const { return {upper, upper, lower, lower}; }
};

// dots [64, kCols] of the plain score become probabilities; the hidden ones are selected to zero after the exponential,
// so that neither an overflow nor a NaN of theirs survives.
template <class Config, bool kKeysInRows, int kCount, class Params, class Stats>
CUFLASH_DEVICE void exponentiate(float (&dots)[kCount], bool masked, const Params& params,
                                 const FragmentPlace<kKeysInRows>& place, const Stats& lse_log2) {
  const float unit = params.softmax_unit;
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const f32x4 lse = lse_log2.of_chunk(i / 4);
    dots[i] = tile::exp2(tile::fma(dots[i], unit, -lse.x));
    dots[i + 1] = tile::exp2(tile::fma(dots[i + 1], unit, -lse.y));
    dots[i + 2] = tile::exp2(tile::fma(dots[i + 2], unit, -lse.z));
    dots[i + 3] = tile::exp2(tile::fma(dots[i + 3], unit, -lse.w));
  }
  if (!masked) return;
  const FragmentMask<typename Config::Mask, kKeysInRows> mask(params, place);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (mask.hides(i)) dots[i] = 0.0f;
  }
}

// The same for one element of any other score: returns the probability, dot becomes its derivative by the natural
// score.
template <class Config, class Params, class Place>
CUFLASH_DEVICE float exponentiate_score(float& dot, const Params& params, const typename Config::Score::Head& head,
                                        const Place& place, int i, float lse_log2) {
  using Score = typename Config::Score;
  const float scaled = dot * params.pre_scale;
  const float score = Score::apply(head, scaled, place.q(i), place.k(i));
  const float prob = tile::exp2(tile::fma(score, params.softmax_unit, -lse_log2));
  const float derivative = prob * Score::derivative(head, scaled, place.q(i), place.k(i));
  dot = prob == 0.0f ? 0.0f : derivative;
  return prob;
}

// And for a fragment: probs receives the probabilities in packed pairs.
template <class Config, bool kKeysInRows, int kCount, class Params, class Stats>
CUFLASH_DEVICE void exponentiate_scores(float (&dots)[kCount], uint32_t (&probs)[kCount / 2], bool masked,
                                        const Params& params, const typename Config::Score::Head& head,
                                        const FragmentPlace<kKeysInRows>& place, const Stats& lse_log2) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const f32x4 lse = lse_log2.of_chunk(i / 4);
    const float p0 = exponentiate_score<Config>(dots[i], params, head, place, i, lse.x);
    const float p1 = exponentiate_score<Config>(dots[i + 1], params, head, place, i + 1, lse.y);
    const float p2 = exponentiate_score<Config>(dots[i + 2], params, head, place, i + 2, lse.z);
    const float p3 = exponentiate_score<Config>(dots[i + 3], params, head, place, i + 3, lse.w);
    probs[i / 2] = ptx::pack2<typename Config::Element>(p0, p1);
    probs[i / 2 + 1] = ptx::pack2<typename Config::Element>(p2, p3);
  }
  if (!masked) return;
  const FragmentMask<typename Config::Mask, kKeysInRows> mask(params, place);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (mask.hides(i)) {
      dots[i] = 0.0f;
      probs[i / 2] &= i % 2 == 0 ? 0xffff0000u : 0x0000ffffu;  // its half of the pair
    }
  }
}

// d(score) of one element. A masked entry is selected to zero: its d(prob) may be anything, because the value that it
// came from may be.
template <bool kMasked>
CUFLASH_DEVICE float differentiate_one(float derivative, float d_prob, float delta) {
  const float d_score = derivative * (d_prob - delta);
  return kMasked && derivative == 0.0f ? 0.0f : d_score;
}

// d(scores) = derivative * (d(probs) - delta), packed in pairs.
template <class Element, bool kMasked, int kCount, class Stats>
CUFLASH_DEVICE void differentiate(uint32_t (&d_scores)[kCount / 2], const float (&derivatives)[kCount],
                                  const float (&d_probs)[kCount], const Stats& stats) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const f32x4 delta = stats.of_chunk(i / 4);
    d_scores[i / 2] = ptx::pack2<Element>(differentiate_one<kMasked>(derivatives[i], d_probs[i], delta.x),
                                          differentiate_one<kMasked>(derivatives[i + 1], d_probs[i + 1], delta.y));
    d_scores[i / 2 + 1] = ptx::pack2<Element>(differentiate_one<kMasked>(derivatives[i + 2], d_probs[i + 2], delta.z),
                                              differentiate_one<kMasked>(derivatives[i + 3], d_probs[i + 3], delta.w));
  }
}

}  // namespace cuflash
