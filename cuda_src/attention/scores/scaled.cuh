// The plain score under a scale that is zero or negative: folding it would turn the row maximum into a minimum.
#pragma once
#include "attention/scores/score.cuh"

namespace cuflash {

struct Scaled {
  struct Params {
    int32_t unused;
  };
  struct Head {};
  static constexpr bool kPreScale = true;

  CUFLASH_DEVICE static Head head(const Params&, int, int) { return {}; }
  CUFLASH_DEVICE static float apply(const Head&, float score, int, KeyPosition) { return score; }
  CUFLASH_DEVICE static float derivative(const Head&, float, int, KeyPosition) { return 1.0f; }
};

}  // namespace cuflash
