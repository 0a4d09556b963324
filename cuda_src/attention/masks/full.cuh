// Every query sees every key.
#pragma once
#include "attention/masks/mask.cuh"

namespace cuflash {

struct Full {
  struct Params {
    int32_t shift;
  };
  static constexpr bool kUniform = true;
  static constexpr bool kGrows = false;
  static constexpr bool kHasLowerEdge = false;

  CUFLASH_DEVICE static bool keeps(const Params&, int, int) { return true; }
  CUFLASH_DEVICE static Range key_range(const Params&, int, int, int seqlen_k) { return {0, seqlen_k}; }
  CUFLASH_DEVICE static Range full_key_range(const Params&, int, int, int seqlen_k) { return {0, seqlen_k}; }
  CUFLASH_DEVICE static Range query_range(const Params&, int, int, int seqlen_q) { return {0, seqlen_q}; }
  CUFLASH_DEVICE static Range full_query_range(const Params&, int, int, int seqlen_q) { return {0, seqlen_q}; }
};

}  // namespace cuflash
