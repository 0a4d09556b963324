// Query q sees keys from q + shift - left to q + shift + right, both inclusive.
#pragma once
#include "attention/masks/mask.cuh"

namespace cuflash {

struct SlidingWindow {
  struct Params {
    int32_t shift;        // key position of query 0
    int32_t left, right;  // keys before and after the query's own position; an open side ends 2^30 from key 0
  };
  static constexpr bool kUniform = false;
  static constexpr bool kGrows = true;  // the first rows' windows are cut off; harmless where they are not
  static constexpr bool kHasLowerEdge = true;

  CUFLASH_DEVICE static bool keeps(const Params& params, int q, int k) {
    return k >= q + params.shift - params.left && k <= q + params.shift + params.right;
  }

  CUFLASH_DEVICE static Range key_range(const Params& params, int first_row, int last_row, int seqlen_k) {
    return cut(first_row + params.shift - params.left, last_row + params.shift + params.right + 1, seqlen_k);
  }
  CUFLASH_DEVICE static Range full_key_range(const Params& params, int first_row, int last_row, int seqlen_k) {
    return cut(last_row + params.shift - params.left, first_row + params.shift + params.right + 1, seqlen_k);
  }
  CUFLASH_DEVICE static Range query_range(const Params& params, int first_key, int last_key, int seqlen_q) {
    return cut(first_key - params.shift - params.right, last_key - params.shift + params.left + 1, seqlen_q);
  }
  CUFLASH_DEVICE static Range full_query_range(const Params& params, int first_key, int last_key, int seqlen_q) {
    return cut(last_key - params.shift - params.right, first_key - params.shift + params.left + 1, seqlen_q);
  }

 private:
  // The part of [begin, end) inside a sequence; an empty one stays inside too.
  CUFLASH_DEVICE static Range cut(int begin, int end, int length) {
    return {tile::clamp(begin, 0, length), tile::clamp(end, 0, length)};
  }
};

}  // namespace cuflash
