// Parameters of the Hopper backward kernels. Twin of cuflash/plan_sm90_backward.py: same names, same order, same bytes.
#pragma once
#include "attention/params.cuh"
#include "tile/tensor_map.cuh"

namespace cuflash {

// One struct for the kernels that multiply; each reads the maps and sizes it needs. Maps of inputs have boxes of 64
// columns by the rows of a block, maps of gradients boxes of 64 columns by the 16 rows of a warp.
template <class Mask, class Score>
struct BackwardSm90Params {
  tile::TensorMap q, k, v, d_out, dq, dk, dv;  // [batch, heads, rows, columns], columns contiguous
  const float* lse_log2;                      // [batch, num_q_heads, stat_rows]; see backward_sm90_prepare
  const float* delta;                         // [batch, num_q_heads, stat_rows]
  float* dq_accumulator;                      // [batch, num_q_heads, num_q_blocks, block_q * columns], opaque order
  uint32_t* dq_turns;                         // [batch, num_q_heads, num_q_blocks, 2]: blocks of keys added so far
  uint32_t* tickets;                          // blocks of keys handed out so far to persistent blocks
  int64_t stat_rows;                          // seqlen_q rounded up to whole blocks of every kernel that reads them
  int32_t batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_k;
  int32_t num_q_blocks, num_k_blocks;
  int32_t heads_per_section;  // heads whose blocks run side by side, longest first, so that they share L2
  float softmax_unit;         // as in the forward: log2 score = unit * apply(pre_scale * dot)
  float pre_scale;
  float grad_scale;  // d(score in natural units) / d(dot)
  typename Mask::Params mask;
  typename Score::Params score;
};

struct BackwardSm90PrepareParams {
  const void* out;
  const void* d_out;
  const float* lse;
  const float* d_lse;  // null without a gradient of lse
  float* lse_log2;
  float* delta;
  float* dq_accumulator;
  uint32_t* dq_turns;  // zeroed
  uint32_t* tickets;   // zeroed; null without
  Strides out_strides, d_out_strides, d_lse_strides;  // elements
  int64_t stat_rows;
  int64_t accumulator_floats;  // of one head; 0 without an accumulator
  int32_t num_q_heads, seqlen_q, head_dim_v, num_row_blocks;
  int32_t turns;  // of one head; 0 where dq is added up in any order
};

struct BackwardSm90FinishParams {
  const float* dq_accumulator;
  const uint32_t* dq_turns;
  void* dq;
  Strides dq_strides;  // elements
  int32_t num_q_heads, seqlen_q, head_dim, num_q_blocks;
  float grad_scale;
};

}  // namespace cuflash
