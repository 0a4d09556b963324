// Query q sees keys up to its own position, q + shift.
#pragma once
#include "attention/masks/mask.cuh"

namespace cuflash {

struct Causal {
  struct Params {
    int32_t shift;  // key position of query 0
  };
  static constexpr bool kUniform = false;
  static constexpr bool kGrows = true;
  static constexpr bool kHasLowerEdge = false;

  CUFLASH_DEVICE static bool keeps(const Params& params, int q, int k) { return k <= q + params.shift; }

  CUFLASH_DEVICE static Range key_range(const Params& params, int, int last_row, int seqlen_k) {
    return {0, tile::clamp(last_row + params.shift + 1, 0, seqlen_k)};
  }
  CUFLASH_DEVICE static Range full_key_range(const Params& params, int first_row, int, int seqlen_k) {
    return {0, tile::clamp(first_row + params.shift + 1, 0, seqlen_k)};
  }
  CUFLASH_DEVICE static Range query_range(const Params& params, int first_key, int, int seqlen_q) {
    return {tile::clamp(first_key - params.shift, 0, seqlen_q), seqlen_q};
  }
  CUFLASH_DEVICE static Range full_query_range(const Params& params, int, int last_key, int seqlen_q) {
    return {tile::clamp(last_key - params.shift, 0, seqlen_q), seqlen_q};
  }
};

}  // namespace cuflash
