// What a mask is: a rule on positions that also bounds the loops over blocks of keys or of queries.
#pragma once
#include "tile/arithmetic.cuh"

namespace cuflash {

// Positions [begin, end); empty when begin >= end.
struct Range {
  int begin, end;

  CUFLASH_DEVICE bool is_empty() const { return begin >= end; }
  CUFLASH_DEVICE bool touches(int first, int count) const { return begin < first + count && end > first; }
};

// A mask is a type with
//   Params                                              what the rule needs at run time
//   kUniform                                            every row sees the same keys
//   kGrows                                              later rows see more keys: their blocks are started first
//   kHasLowerEdge                                       some rows do not see key 0
//   keeps(params, q, k)                                 whether row q sees key k; both are inside the sequences
//   key_range(params, first_row, last_row, seqlen_k)    keys that any of these rows may see
//   full_key_range(params, first_row, last_row, ...)    keys that each of these rows sees: no masking there
//   query_range(params, first_key, last_key, seqlen_q)  rows that may see any of these keys
//   full_query_range(params, first_key, last_key, ...)  rows that see each of these keys
// A row's keys are one interval. Lengths and shifts are below 2^30 and no edge lies farther than 2^30 from q = k = 0, so
// that 32-bit sums do not wrap.
template <class Mask>
concept IsMask = requires(typename Mask::Params params) {
  { Mask::keeps(params, 0, 0) };
  { Mask::key_range(params, 0, 0, 0).begin };
  { Mask::full_key_range(params, 0, 0, 0).begin };
  { Mask::query_range(params, 0, 0, 0).begin };
  { Mask::full_query_range(params, 0, 0, 0).begin };
  requires Mask::kUniform || !Mask::kUniform;
  requires Mask::kGrows || !Mask::kGrows;
  requires Mask::kHasLowerEdge || !Mask::kHasLowerEdge;
};

}  // namespace cuflash
