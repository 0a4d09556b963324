// What one pair of query and key contributes to the gradients.
#pragma once
#include "attention/scores/score.cuh"

namespace cuflash {

struct PairGradient {
  float prob;     // P
  float d_score;  // gradient of the score before the score function, in natural units
};

// The recomputed probability and its gradient: dS = P (dP - delta) times the score function's slope.
template <class Score>
CUFLASH_DEVICE PairGradient gradient_of_pair(const typename Score::Head& head, float softmax_unit, float pre_scale,
                                             float dot, float d_prob, float lse_log2, float delta, int q, int k) {
  const float score = Score::kPreScale ? dot * pre_scale : dot;
  const float prob = tile::exp2(tile::fma(Score::apply(head, score, q, k), softmax_unit, -lse_log2));
  return {prob, prob * (d_prob - delta) * Score::derivative(head, score, q, k)};
}

}  // namespace cuflash
