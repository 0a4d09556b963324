// score - slope * distance from the query's own key position; one slope a query head, or one a batch and query head.
#pragma once
#include "attention/scores/score.cuh"

namespace cuflash {

struct Alibi {
  struct Params {
    const float* slopes;   // [num_q_heads] or [batch, num_q_heads], heads side by side
    int64_t batch_stride;  // elements; 0 for one set of slopes
    int32_t shift;         // key position of query 0
  };
  struct Head {
    float slope;
    int32_t shift;
  };
  static constexpr bool kPreScale = true;

  CUFLASH_DEVICE static Head head(const Params& params, int q_head, int batch) {
    return {tile::read(params.slopes + batch * params.batch_stride + q_head), params.shift};
  }

  CUFLASH_DEVICE static float apply(const Head& head, float score, int q, KeyPosition k) {
    // The subtraction in float32 rounds only distances beyond 2^24, as their conversion would.
    const float distance = static_cast<float>(q + head.shift - k.start) - static_cast<float>(k.offset);
    return tile::fma(-head.slope, tile::magnitude(distance), score);
  }
  CUFLASH_DEVICE static float derivative(const Head&, float, int, KeyPosition) { return 1.0f; }
};

}  // namespace cuflash
