// cap * tanh(score / cap): the identity for small scores, never beyond the cap.
#pragma once
#include "attention/scores/score.cuh"

namespace cuflash {

struct Softcap {
  struct Params {
    float cap, inverse_cap;
  };
  using Head = Params;
  static constexpr bool kPreScale = true;

  CUFLASH_DEVICE static Head head(const Params& params, int, int) { return params; }

  CUFLASH_DEVICE static float apply(const Head& head, float score, int, KeyPosition) {
    return head.cap * tanh(score * head.inverse_cap);
  }

  CUFLASH_DEVICE static float derivative(const Head& head, float score, int, KeyPosition) {
    const float t = tanh(score * head.inverse_cap);
    return tile::fma(-t, t, 1.0f);
  }

 private:
  // The exponential form loses the digits of a small x to 1 - 1, so the series takes over there: its first neglected
  // term is 5e-8 of the result at 0.3. The hardware's tanh has 11 bits only.
  CUFLASH_DEVICE static float tanh(float x) {
    const float square = x * x;
    float series = tile::fma(square, 62.0f / 2835.0f, -17.0f / 315.0f);
    series = tile::fma(square, series, 2.0f / 15.0f);
    series = tile::fma(square, series, -1.0f / 3.0f);
    series = tile::fma(square * x, series, x);
    const float power = tile::exp2(x * (2.0f * kLog2E));  // inf far to the right: then 1 - 0
    const float closed = tile::fma(-2.0f, tile::reciprocal(power + 1.0f), 1.0f);
    return tile::magnitude(x) < 0.3f ? series : closed;
  }
};

}  // namespace cuflash
