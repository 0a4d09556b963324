// Arguments of the sm_90 forward kernel. Twin of cuflash/params_sm90.py: same names, same order, same bytes.
#pragma once
#include "attention/params.cuh"
#include "tile/tensor_map.cuh"

namespace cuflash {

template <class Mask, class Score>
struct ForwardSm90Params {
  tile::TensorMap q_map, k_map, v_map;  // [batch, head, row, dim], boxes of 64 columns; rows: a part of a tile's, a block
  tile::TensorMap out_map;              // the same, boxes of 16 rows; unset without Config::kOutSlabs
  void* out;                            // Element; float when keys are split, one part a split
  float* lse;                           // [batch, num_q_heads, seqlen_q], contiguous; one such array a split
  uint32_t* counter;                    // zero before and after every launch; only dynamic schedules touch it
  Strides out_strides;                  // elements
  int64_t split_rows;                   // batch * num_q_heads * seqlen_q: rows of one split
  int32_t num_q_heads, seqlen_q, seqlen_k, head_dim_v;
  int32_t group;          // query heads that share a head of keys and values
  int32_t tile_heads;     // heads that tiles are counted by: query heads, or groups of them when heads are packed
  int32_t tile_rows;      // rows of such a head: seqlen_q, times group when heads are packed
  int32_t num_q_blocks;   // tiles of queries a head
  int32_t num_splits;     // parts of the keys of one tile of queries; 1 unless keys are split
  int32_t num_tiles;      // num_splits * num_q_blocks * tile_heads * batch
  int32_t section_heads;  // heads whose tiles stand next to each other in the order of tiles
  float softmax_unit;     // log2 score = unit * score
  float pre_scale;        // what a score function expects its dot product to be multiplied by
  typename Mask::Params mask;
  typename Score::Params score;
};

// Puts the parts of split keys together.
struct ForwardCombineParams {
  const float* split_out;  // [num_splits, batch, num_q_heads, seqlen_q, head_dim_v]
  const float* split_lse;  // [num_splits, batch, num_q_heads, seqlen_q]
  void* out;
  float* lse;
  Strides out_strides;  // elements
  int64_t split_rows;   // batch * num_q_heads * seqlen_q
  int32_t num_q_heads, seqlen_q, head_dim_v, num_splits;
};

}  // namespace cuflash
