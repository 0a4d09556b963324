// Arguments of the sm_90 forward kernel. Twin of cuflash/params_sm90.py: same names, same order, same bytes.
#pragma once
#include "attention/params.cuh"
#include "tile/tensor_map.cuh"

namespace cuflash {

template <class Mask, class Score>
struct ForwardSm90Params {
  tile::TensorMap q_map, k_map, v_map;  // [batch, head, row, dim], boxes of 64 columns and one tile of rows
  void* out;                            // Element, 16-byte pieces
  float* lse;                           // [batch, num_q_heads, seqlen_q], contiguous
  uint32_t* counter;                    // zero before and after every launch; only dynamic schedules touch it
  Strides out_strides;                  // elements
  int32_t num_q_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim_v;
  int32_t num_q_blocks;   // tiles of queries a head
  int32_t num_tiles;      // num_q_blocks * num_q_heads * batch
  int32_t section_heads;  // heads whose tiles stand next to each other in the order of tiles
  float softmax_unit;     // log2 score = unit * score
  float pre_scale;        // what a score function expects its dot product to be multiplied by
  typename Mask::Params mask;
  typename Score::Params score;
};

}  // namespace cuflash
