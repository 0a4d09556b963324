// delta = rowsum(d_out * out) - d_lse, lse in the main kernel's units, and zeros where the main kernel adds up dq.
#pragma once
#include "attention/gradient.cuh"
#include "attention/params_backward.cuh"
#include "attention/sequence.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"
#include "tile/row_vector.cuh"

namespace cuflash {

// How the lanes of a warp share rows: the fewest lanes that cover a row in one access each, so that short rows come
// several to a warp.
template <class Config>
struct PrepareLanes {
  using Vector = tile::RowVector<typename Config::Element, Config::kCopyBytes>;
  static constexpr int lanes_for(int vectors) {
    int lanes = 1;
    while (lanes < vectors && lanes < 32) lanes *= 2;
    return lanes;
  }
  static constexpr int kVectors = (Config::kHeadDimV + Vector::kElements - 1) / Vector::kElements;  // a row
  static constexpr int kPerRow = lanes_for(kVectors);
  static constexpr int kSteps = (kVectors + kPerRow - 1) / kPerRow;
  static constexpr int kRowsPerPass = 32 / kPerRow * Config::kWarps;
  static constexpr int kPasses = (Config::kBlockQ + kRowsPerPass - 1) / kRowsPerPass;
};

// This lane's share of sum(d_out * out) over one row.
template <class Config>
CUFLASH_DEVICE float partial_delta(const PrepareParams& params, int batch, int head, int row, int lane_in_row) {
  using Element = typename Config::Element;
  using Lanes = PrepareLanes<Config>;
  using Vector = typename Lanes::Vector;
  const Element* out_gmem =
      head_of<Element>(params.out, params.out_strides, batch, head) + row * params.out_strides.row;
  const Element* d_out_gmem =
      head_of<Element>(params.d_out, params.d_out_strides, batch, head) + row * params.d_out_strides.row;
  float sum = 0.0f;
#pragma unroll
  for (int step = 0; step < Lanes::kSteps; ++step) {
    const int col = (step * Lanes::kPerRow + lane_in_row) * Vector::kElements;
    const int safe_col = col < params.head_dim_v ? col : 0;  // a load without a branch; its value is not used
    const Vector out = Vector::load(out_gmem, params.out_strides.dim, safe_col);
    const Vector d_out = Vector::load(d_out_gmem, params.d_out_strides.dim, safe_col);
    float part = 0.0f;
#pragma unroll
    for (int i = 0; i < Vector::kElements; ++i) part = ptx::fma(out.values[i], d_out.values[i], part);
    sum += col < params.head_dim_v ? part : 0.0f;
  }
  return sum;
}

// Writes what the main kernels need of one row. A row without keys has lse = -inf and takes no part, whatever its d_out
// holds, and neither does a row past seqlen_q: exp2(score - inf) is 0.
template <class Element>
CUFLASH_DEVICE void store_row_statistics(const PrepareParams& params, int batch, int head, int row, float row_sum) {
  const int64_t batch_head = static_cast<int64_t>(batch) * params.num_q_heads + head;
  float row_base = kInfinity;
  float delta = 0.0f;
  if (row < params.seqlen_q) {
    const float lse = ptx::load_global<float>(params.lse + batch_head * params.seqlen_q + row);
    if (lse != -kInfinity) {
      row_base = kHasNaturalBase<Element> ? lse : lse * kLog2E;
      delta = row_sum;
      if (params.d_lse != nullptr) {
        const Strides& strides = params.d_lse_strides;
        const float* d_lse_gmem = params.d_lse + batch * strides.batch + head * strides.head + row * strides.row;
        delta -= ptx::load_global<float>(d_lse_gmem);
      }
    }
  }
  ptx::store_global(params.row_base + batch_head * params.stat_rows + row, row_base);
  ptx::store_global(params.delta + batch_head * params.stat_rows + row, delta);
}

// The accumulator holds 16-row tiles one after the other, accumulator_columns floats a row; 0 columns without one.
template <class Config>
CUFLASH_DEVICE void clear_accumulator(const PrepareParams& params, int batch_head, int first_row) {
  const int accumulator_rows = tile::ceil_div(params.seqlen_q, 16) * 16;
  const int floats = tile::smaller(Config::kBlockQ, accumulator_rows - first_row) * params.accumulator_columns;
  float* zeros_gmem = params.dq_accumulator +
                      (static_cast<int64_t>(batch_head) * accumulator_rows + first_row) * params.accumulator_columns;
  for (int i = ptx::thread_index() * 4; i < floats; i += Config::kWarps * 32 * 4) {
    ptx::store_global(zeros_gmem + i, f32x4{0.0f, 0.0f, 0.0f, 0.0f});
  }
}

// One block: Config::kBlockQ rows of one head.
template <class Config>
CUFLASH_DEVICE void backward_prepare(const PrepareParams& params) {
  using Lanes = PrepareLanes<Config>;
  const auto [row_block, head, batch] = position_by_head(ptx::block_index(), params.num_row_blocks, params.num_q_heads);
  const int first_row = row_block * Config::kBlockQ;
  const int lane_in_row = ptx::lane_index() % Lanes::kPerRow;
  const int row_in_pass = ptx::thread_index() / Lanes::kPerRow;

  // All rows are read before the first result is written: stores keep their order against loads.
  float sums[Lanes::kPasses];
#pragma unroll
  for (int pass = 0; pass < Lanes::kPasses; ++pass) {
    const int row = first_row + pass * Lanes::kRowsPerPass + row_in_pass;
    sums[pass] = partial_delta<Config>(params, batch, head, ptx::min(row, params.seqlen_q - 1), lane_in_row);
  }
#pragma unroll
  for (int pass = 0; pass < Lanes::kPasses; ++pass) {
#pragma unroll
    for (int mask = Lanes::kPerRow / 2; mask > 0; mask /= 2) sums[pass] += ptx::shuffle_xor(sums[pass], mask);
    const int row = first_row + pass * Lanes::kRowsPerPass + row_in_pass;
    if (lane_in_row == 0 && row < ptx::min(params.stat_rows, first_row + Config::kBlockQ)) {
      store_row_statistics<typename Config::Element>(params, batch, head, row, sums[pass]);
    }
  }
  clear_accumulator<Config>(params, batch * params.num_q_heads + head, first_row);
}

}  // namespace cuflash
