// What a score function is: a change of the score of one (query, key) pair before mask and softmax.
#pragma once
#include "tile/arithmetic.cuh"

namespace cuflash {

// Where a key stands: `offset` after `start`. With an offset that the compiler knows, what depends on start alone is
// worked out once for all keys of a thread. A plain position converts.
struct KeyPosition {
  int start, offset;
  CUFLASH_DEVICE KeyPosition(int start, int offset = 0) : start(start), offset(offset) {}
};

// A score function is a type with
//   Params                                 what it needs at run time
//   Head, head(params, q_head, batch)      what it needs to know about one query head, read once a block
//   kPreScale                              apply wants scale * dot; otherwise it is the identity and gets the bare dot
//                                          product, whose scale the softmax folds into its unit
//   apply(head, score, q, k)               the score that enters the softmax, natural units
//   derivative(head, score, q, k)          d apply / d score at the score that entered apply
// A score of -inf hides its pair as a mask does; a row whose scores are all -inf counts as a row without keys.
template <class Score>
concept IsScore = requires(typename Score::Params params, typename Score::Head head) {
  { Score::head(params, 0, 0) };
  { Score::apply(head, 0.0f, 0, KeyPosition(0)) };
  { Score::derivative(head, 0.0f, 0, KeyPosition(0)) };
  requires Score::kPreScale || !Score::kPreScale;
};

}  // namespace cuflash
