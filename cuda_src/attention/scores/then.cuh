// First, then Second.
#pragma once
#include "attention/scores/score.cuh"

namespace cuflash {

template <class First, class Second>
struct Then {
  struct Params {
    typename First::Params first;
    typename Second::Params second;
  };
  struct Head {
    typename First::Head first;
    typename Second::Head second;
  };
  static constexpr bool kPreScale = true;

  CUFLASH_DEVICE static Head head(const Params& params, int q_head, int batch) {
    return {First::head(params.first, q_head, batch), Second::head(params.second, q_head, batch)};
  }

  CUFLASH_DEVICE static float apply(const Head& head, float score, int q, KeyPosition k) {
    return Second::apply(head.second, First::apply(head.first, score, q, k), q, k);
  }

  CUFLASH_DEVICE static float derivative(const Head& head, float score, int q, KeyPosition k) {
    const float inner = First::apply(head.first, score, q, k);
    return Second::derivative(head.second, inner, q, k) * First::derivative(head.first, score, q, k);
  }
};

}  // namespace cuflash
