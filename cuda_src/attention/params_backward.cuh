// Arguments of the backward kernels of the sm_80 family. Twin of cuflash/params_backward.py: same names, order, bytes.
#pragma once
#include "attention/params.cuh"

namespace cuflash {

// The kernels that multiply; each reads the part it needs.
template <class Mask, class Score>
struct BackwardParams {
  const void* q;          // [batch, seqlen_q, num_q_heads, head_dim]
  const void* k;          // [batch, seqlen_k, num_kv_heads, head_dim]
  const void* v;          // [batch, seqlen_k, num_kv_heads, head_dim_v]
  const void* d_out;      // [batch, seqlen_q, num_q_heads, head_dim_v]
  const float* row_base;  // [batch, num_q_heads, stat_rows]: lse in softmax_unit's units, +inf where nothing is to do
  const float* delta;     // [batch, num_q_heads, stat_rows]
  void* dq;               // as q
  void* dk;               // as k
  void* dv;               // as v
  float* dq_accumulator;  // [batch, num_q_heads, ceil(seqlen_q / 16), padded head_dim / 8, 16 * 8 in fragment order]
  Strides q_strides, k_strides, v_strides, d_out_strides, dq_strides, dk_strides, dv_strides;
  int32_t batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v;
  int32_t stat_rows, num_q_blocks, num_k_blocks;
  float softmax_unit;  // as in the forward: log2 score = unit * Score::apply(pre_scale * dot); natural for float32
  float pre_scale;
  float grad_scale;  // d(score in natural units) / d(dot): the softmax scale
  typename Mask::Params mask;
  typename Score::Params score;
};

struct PrepareParams {
  const void* out;        // [batch, seqlen_q, num_q_heads, head_dim_v]
  const void* d_out;      // as out
  const float* lse;       // [batch, num_q_heads, seqlen_q], contiguous, natural logarithm
  const float* d_lse;     // as lse, any strides; null without a gradient of lse
  float* row_base;        // [batch, num_q_heads, stat_rows]
  float* delta;           // [batch, num_q_heads, stat_rows]
  float* dq_accumulator;  // see BackwardParams
  Strides out_strides, d_out_strides, d_lse_strides;  // elements; d_lse has no dim
  int32_t num_q_heads, seqlen_q, head_dim_v, stat_rows, num_row_blocks;
  int32_t accumulator_columns;  // padded head_dim; 0 without an accumulator
};

struct FinishParams {
  const float* dq_accumulator;  // see BackwardParams
  void* dq;                     // [batch, seqlen_q, num_q_heads, head_dim]
  Strides dq_strides;           // elements
  int32_t num_q_heads, seqlen_q, head_dim, num_row_blocks;
  float grad_scale;
};

}  // namespace cuflash
