// Puts together the outputs of a row whose keys were split: each part is a softmax of its own, weighted by its row sum.
#pragma once
#include "attention/params_sm90.cuh"
#include "ptx/element_types.cuh"
#include "ptx/registers.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"
#include "tile/arithmetic.cuh"

namespace cuflash {

inline constexpr int kCombineSplitsPerLane = 4;  // at most 128 splits

// The weights of a row's splits, split lane + 32 i in register i, and the lse of the whole row.
CUFLASH_DEVICE float combine_weights(const ForwardCombineParams& params, int64_t row,
                                     float (&weights)[kCombineSplitsPerLane]) {
  float largest = -kInfinity, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kCombineSplitsPerLane; ++i) {
    const int split = static_cast<int>(ptx::lane_index()) + 32 * i;
    const bool exists = split < params.num_splits;
    weights[i] = exists ? tile::read(params.split_lse + split * params.split_rows + row) : -kInfinity;
    largest = tile::larger(largest, weights[i]);
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) largest = tile::larger(largest, ptx::shuffle_xor(largest, mask));
  if (largest == -kInfinity) largest = 0.0f;  // a row without keys: every weight is 0
#pragma unroll
  for (int i = 0; i < kCombineSplitsPerLane; ++i) {
    weights[i] = tile::exp2((weights[i] - largest) * kLog2E);
    sum += weights[i];
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += ptx::shuffle_xor(sum, mask);
  const float inverse = sum == 0.0f ? 0.0f : tile::reciprocal(sum);
#pragma unroll
  for (int i = 0; i < kCombineSplitsPerLane; ++i) weights[i] *= inverse;
  return sum == 0.0f ? -kInfinity : largest + tile::log2(sum) * kLn2;
}

// One warp a row, kWarps rows a block; a lane owns column pairs 64 columns apart.
template <class Config>
CUFLASH_DEVICE void forward_combine(const ForwardCombineParams& params) {
  using Element = typename Config::Element;
  constexpr int kPairs = (Config::kHeadDimV + 63) / 64;
  const int64_t row = static_cast<int64_t>(ptx::block_index()) * Config::kWarps + ptx::warp_index();
  if (row >= params.split_rows) return;
  float weights[kCombineSplitsPerLane], out[2 * kPairs] = {};
  ptx::griddepcontrol_wait();  // the parts are complete
  const float lse = combine_weights(params, row, weights);
  const int lane = ptx::lane_index();
#pragma unroll
  for (int i = 0; i < kCombineSplitsPerLane; ++i) {
    const int count = tile::smaller(params.num_splits - 32 * i, 32);
#pragma unroll 4
    for (int within = 0; within < count; ++within) {
      const float weight = ptx::shuffle_index(weights[i], within);
      const float* part = params.split_out + ((within + 32 * i) * params.split_rows + row) * params.head_dim_v;
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const int col = 2 * lane + 64 * pair;
        if (col >= params.head_dim_v) continue;
        const f32x2 values = ptx::load_global<f32x2>(part + col);
        out[2 * pair] = tile::fma(weight, values.x, out[2 * pair]);
        out[2 * pair + 1] = tile::fma(weight, values.y, out[2 * pair + 1]);
      }
    }
  }
  const int64_t head = row / params.seqlen_q;
  Element* out_gmem = static_cast<Element*>(params.out) + row % params.seqlen_q * params.out_strides.row +
                      head % params.num_q_heads * params.out_strides.head +
                      head / params.num_q_heads * params.out_strides.batch;
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    const int col = 2 * lane + 64 * pair;
    if (col >= params.head_dim_v) continue;
    ptx::store_global(out_gmem + col * params.out_strides.dim, ptx::from_float<Element>(out[2 * pair]));
    ptx::store_global(out_gmem + (col + 1) * params.out_strides.dim, ptx::from_float<Element>(out[2 * pair + 1]));
  }
  if (lane == 0) ptx::store_global(params.lse + row, lse);
}

}  // namespace cuflash
