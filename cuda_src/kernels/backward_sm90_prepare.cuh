// What the Hopper backward kernels find ready: delta = rowsum(d_out * out) - d_lse, lse in log2 units, and zeros where
// dq is added up or, in a fixed order, where its turns are counted. Moves bytes and nothing else, so each thread keeps
// several loads of 16 bytes in flight.
//
// lse also says which rows may hold something that is not finite: where it is finite, so are the row's query and d_out.
#pragma once
#include "attention/params_sm90_backward.cuh"
#include "ptx/element_types.cuh"
#include "ptx/registers.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"
#include "tile/arithmetic.cuh"
#include "tile/element.cuh"

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

// Whether any of eight elements is NaN or infinite.
template <class Element>
CUFLASH_DEVICE bool has_nonfinite(const u32x4& eight) {
  const uint32_t signs = tile::nonfinite_signs<Element>(eight.x) | tile::nonfinite_signs<Element>(eight.y) |
                         tile::nonfinite_signs<Element>(eight.z) | tile::nonfinite_signs<Element>(eight.w);
  return (signs & tile::kSignMask<Element>) != 0;
}

// lse and its gradient for one row.
struct RowLse {
  float lse, gradient;
};
CUFLASH_DEVICE RowLse load_row_lse(const BackwardSm90PrepareParams& params, int batch, int head, int row) {
  if (row >= params.seqlen_q) return {0.0f, 0.0f};
  const int64_t batch_head = static_cast<int64_t>(batch) * params.num_q_heads + head;
  const Strides& strides = params.d_lse_strides;
  const int64_t place = batch * strides.batch + head * strides.head + row * strides.row;
  return {tile::read(params.lse + batch_head * params.seqlen_q + row),
          params.d_lse == nullptr ? 0.0f : tile::read(params.d_lse + place)};
}

// Rows without keys get lse = +inf and delta = 0: exp2(score - inf) is 0, whatever d_out holds there. So do rows past
// seqlen_q, which are zeros, with a number that is as good. A row that sees something not finite, or whose d_out is
// spoiled by it, gets NaN: so are its probabilities, and what is not finite may be cleared from its elements.
CUFLASH_DEVICE void store_row_stats(const BackwardSm90PrepareParams& params, int batch, int head, int row,
                                    const RowLse& row_lse, float sum, bool is_spoiled) {
  constexpr float kPastTheEnd = 1e30f, kNotANumber = __builtin_bit_cast(float, 0x7fc00000);
  const int64_t stat = (static_cast<int64_t>(batch) * params.num_q_heads + head) * params.stat_rows + row;
  const bool has_keys = row_lse.lse != -kInfinity;
  float lse_log2 = row_lse.lse * kLog2E;
  if (is_spoiled || !(tile::magnitude(row_lse.lse) < kInfinity)) lse_log2 = kNotANumber;
  if (!has_keys) lse_log2 = kInfinity;
  if (row >= params.seqlen_q) lse_log2 = kPastTheEnd;
  ptx::store_global(params.lse_log2 + stat, lse_log2);
  ptx::store_global(params.delta + stat, has_keys ? sum - row_lse.gradient : 0.0f);
}

// One block: Config::kBlockRows rows of one head, neighbouring blocks neighbouring heads, whose rows are neighbours in
// memory. kRowLanes lanes share a row, eight columns each.
template <class Config>
CUFLASH_DEVICE void backward_sm90_prepare(const BackwardSm90PrepareParams& params) {
  using Element = typename Config::Element;
  constexpr int kThreads = Config::kThreads, kRowLanes = Config::kRowLanes, kRowsAtOnce = kThreads / kRowLanes;
  constexpr int kPasses = Config::kBlockRows / kRowsAtOnce;
  static_assert(Config::kBlockRows % kRowsAtOnce == 0, "whole passes");
  ptx::griddepcontrol_launch();
  // The last rows first: the kernel that follows begins with the first ones and finds their d_out in L2.
  const int index = ptx::grid_size() - 1 - ptx::block_index();
  const int head = index % params.num_q_heads;
  const int rest = index / params.num_q_heads;
  const int first_row = rest % params.num_row_blocks * Config::kBlockRows;
  const int batch = rest / params.num_row_blocks;
  const Element* out_gmem = static_cast<const Element*>(params.out) + batch * params.out_strides.batch +
                            head * params.out_strides.head;
  const Element* d_out_gmem = static_cast<const Element*>(params.d_out) + batch * params.d_out_strides.batch +
                              head * params.d_out_strides.head;
  const int lane_in_row = ptx::thread_index() % kRowLanes;
  const int own_row = first_row + ptx::thread_index() / kRowLanes;
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
  if (first_row == 0) {
    for (int i = ptx::thread_index(); i < params.turns; i += kThreads) {
      ptx::store_global(params.dq_turns + batch_head * params.turns + i, 0u);
    }
  }
  if (index == 0 && ptx::thread_index() == 0 && params.tickets != nullptr) ptx::store_global(params.tickets, 0u);
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
    for (int mask = kRowLanes / 2; mask > 0; mask /= 2) sum += ptx::shuffle_xor(sum, mask);
    const uint32_t spoiled_lanes = ptx::ballot(has_nonfinite<Element>(d_out[pass]));
    if (lane_in_row == 0 && row < params.stat_rows) {  // of a row's lanes the first: those of its row are next to it
      const bool is_spoiled = (spoiled_lanes >> ptx::lane_index() & 0xffffffffu >> (32 - kRowLanes)) != 0;
      store_row_stats(params, batch, head, row, lse[pass], sum, is_spoiled);
    }
  }
}

}  // namespace cuflash
