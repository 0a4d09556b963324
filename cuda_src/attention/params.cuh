// Kernel arguments: plain structs, pointers first. Twin of cuflash/params.py, which packs the same bytes.
#pragma once
#include "ptx/platform.cuh"

namespace cuflash {

// Distances in elements between neighbours along each axis of [batch, row, head, dim].
struct Strides {
  int64_t batch, row, head, dim;
};

template <class Mask, class Score>
struct ForwardParams {
  const void* q;  // [batch, seqlen_q, num_q_heads, head_dim]
  const void* k;  // [batch, seqlen_k, num_kv_heads, head_dim]
  const void* v;  // [batch, seqlen_k, num_kv_heads, head_dim_v]
  void* out;      // [batch, seqlen_q, num_q_heads, head_dim_v]
  float* lse;     // [batch, num_q_heads, seqlen_q], contiguous, natural logarithm
  Strides q_strides, k_strides, v_strides, out_strides;
  int32_t batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v, num_q_blocks;
  float softmax_unit;  // log2 units per unit of score: scale * log2(e) when the scale is folded in, log2(e) otherwise
  float pre_scale;     // what a dot product is multiplied by before Score::apply, when Score::kPreScale
  typename Mask::Params mask;
  typename Score::Params score;
};

}  // namespace cuflash
