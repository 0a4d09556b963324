// What one pair of query and key contributes to the gradients.
#pragma once
#include "attention/scores/score.cuh"

namespace cuflash {

struct PairGradient {
  float prob;     // P
  float d_score;  // gradient of the score before the score function, in natural units
};

// float32 gradients stay in the natural units in which lse came: bringing a large lse to log2 units would round it once
// more. 16-bit gradients save the multiplication.
template <class Element>
inline constexpr bool kHasNaturalBase = sizeof(Element) == 4;

// The recomputed probability and its gradient: dS = P (dP - delta) times the score function's slope.
template <class Score, class Element>
CUFLASH_DEVICE PairGradient gradient_of_pair(const typename Score::Head& head, float softmax_unit, float pre_scale,
                                             float dot, float d_prob, float row_base, float delta, int q, int k) {
  const float score = Score::kPreScale ? dot * pre_scale : dot;
  const float exponent = tile::fma(Score::apply(head, score, q, k), softmax_unit, -row_base);
  const float prob = tile::exp2(kHasNaturalBase<Element> ? exponent * kLog2E : exponent);
  return {prob, prob * (d_prob - delta) * Score::derivative(head, score, q, k)};
}

}  // namespace cuflash
