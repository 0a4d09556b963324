// What the Hopper backward kernels find ready: delta = rowsum(d_out * out) - d_lse, lse in log2 units, and zeros where
// dq is added up. Moves bytes and nothing else, so each thread keeps several loads of 16 bytes in flight.
#pragma once
#include "attention/params_sm90_backward.cuh"
#include "ptx/element_types.cuh"
#include "ptx/registers.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"
#include "tile/arithmetic.cuh"

namespace cuflash {

// The sum of the products of eight elements.
template <class Element>
CUFLASH_DEVICE float dot_of_eight(const u32x4& a, const u32x4& b) {
  const uint32_t left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float a_low, a_high, b_low, b_high;
    ptx::unpack2<Element>(left[i], a_low, a_high);
    ptx::unpack2<Element>(right[i], b_low, b_high);
    sum = tile::fma(a_high, b_high, tile::fma(a_low, b_low, sum));
  }
  return sum;
}

// lse and its gradient for one row; -inf, as of a row without keys, past seqlen_q.
struct RowLse {
  float lse, gradient;
};
CUFLASH_DEVICE RowLse load_row_lse(const BackwardSm90PrepareParams& params, int batch, int head, int row) {
  if (row >= params.seqlen_q) return {-kInfinity, 0.0f};
  const int64_t batch_head = static_cast<int64_t>(batch) * params.num_q_heads + head;
  const Strides& strides = params.d_lse_strides;
  const int64_t place = batch * strides.batch + head * strides.head + row * strides.row;
  return {tile::read(params.lse + batch_head * params.seqlen_q + row),
          params.d_lse == nullptr ? 0.0f : tile::read(params.d_lse + place)};
}

// Rows without keys get lse = +inf and delta = 0: exp2(score - inf) is 0, whatever d_out holds there.
CUFLASH_DEVICE void store_row_stats(const BackwardSm90PrepareParams& params, int batch, int head, int row,
                                    const RowLse& row_lse, float sum) {
  const int64_t stat = (static_cast<int64_t>(batch) * params.num_q_heads + head) * params.stat_rows + row;
  const bool has_keys = row_lse.lse != -kInfinity;
  ptx::store_global(params.lse_log2 + stat, has_keys ? row_lse.lse * kLog2E : kInfinity);
  ptx::store_global(params.delta + stat, has_keys ? sum - row_lse.gradient : 0.0f);
}

// One block: Config::kBlockRows rows of one head, neighbouring blocks neighbouring heads, whose rows are neighbours in
// memory. Config::kRowLanes lanes share a row, eight columns each.
template <class Config>
CUFLASH_DEVICE void backward_sm90_prepare(const BackwardSm90PrepareParams& params) {
  using Element = typename Config::Element;
  constexpr int kThreads = Config::kThreads, kRowsAtOnce = kThreads / Config::kRowLanes;
  constexpr int kPasses = Config::kBlockRows / kRowsAtOnce;
  static_assert(Config::kBlockRows % kRowsAtOnce == 0, "whole passes");
  ptx::griddepcontrol_launch();
  const int head = ptx::block_index() % params.num_q_heads;
  const int rest = ptx::block_index() / params.num_q_heads;
  const int first_row = rest % params.num_row_blocks * Config::kBlockRows;
  const int batch = rest / params.num_row_blocks;
  const Element* out_gmem = static_cast<const Element*>(params.out) + batch * params.out_strides.batch +
                            head * params.out_strides.head;
  const Element* d_out_gmem = static_cast<const Element*>(params.d_out) + batch * params.d_out_strides.batch +
                              head * params.d_out_strides.head;
  const int lane_in_row = ptx::thread_index() % Config::kRowLanes;
  const int own_row = first_row + ptx::thread_index() / Config::kRowLanes;
  const int col = lane_in_row * 8;
  const bool has_cols = col < params.head_dim_v;

  u32x4 out[kPasses], d_out[kPasses];
  RowLse lse[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = own_row + pass * kRowsAtOnce;
    out[pass] = d_out[pass] = {0, 0, 0, 0};
    if (has_cols && row < params.seqlen_q) {
      out[pass] = ptx::load_global<u32x4>(out_gmem + row * params.out_strides.row + col);
      d_out[pass] = ptx::load_global<u32x4>(d_out_gmem + row * params.d_out_strides.row + col);
    }
    if (lane_in_row == 0) lse[pass] = load_row_lse(params, batch, head, row);
  }

  // The accumulator's zeros travel while the loads are on their way.
  const int64_t batch_head = static_cast<int64_t>(batch) * params.num_q_heads + head;
  const int64_t share = static_cast<int64_t>(Config::kBlockRows) * Config::kAccumulatorCols;
  const int64_t first = first_row / Config::kBlockRows * share;
  const int64_t last = ptx::min(first + share, params.accumulator_floats);
  float* zeros_gmem = params.dq_accumulator + batch_head * params.accumulator_floats;
  for (int64_t i = first + ptx::thread_index() * 4; i < last; i += kThreads * 4) {
    ptx::store_global(zeros_gmem + i, f32x4{0.0f, 0.0f, 0.0f, 0.0f});
  }

#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = own_row + pass * kRowsAtOnce;
    float sum = dot_of_eight<Element>(out[pass], d_out[pass]);
#pragma unroll
    for (int mask = Config::kRowLanes / 2; mask > 0; mask /= 2) sum += ptx::shuffle_xor(sum, mask);
    if (lane_in_row == 0 && row < params.stat_rows) store_row_stats(params, batch, head, row, lse[pass], sum);
  }
}

}  // namespace cuflash
