// The end of a block of the sm_80 forward: from sums in registers to rows in memory.
#pragma once
#include "attention/softmax.cuh"
#include "kernels/forward_sm80_layout.cuh"
#include "ptx/barrier.cuh"
#include "tile/fragment.cuh"
#include "tile/store.cuh"

namespace cuflash {

// Divides by the row sums and writes the output and the logarithms of the sums. `place` is the block's position, worked
// out anew, as is the warp's: nothing of it needs a register while keys are visited.
template <class Config, class Params, class Out, class Softmax>
CUFLASH_DEVICE void store_forward(const Params& params, const BlockPosition& place, uint32_t shared, Out& out,
                                  const Softmax& softmax) {
  using Layout = ForwardLayout<Config>;
  using Element = typename Config::Element;
  const int warp_first_row = ptx::opaque(static_cast<int>(ptx::thread_index())) / 32 * Layout::kWarpRows;
  const int first_row = place.row_block * Config::kBlockQ;
  const int rows = ptx::min(Config::kBlockQ, params.seqlen_q - first_row);
  const int64_t head = static_cast<int64_t>(place.batch) * params.num_q_heads + place.head;
  float* lse_gmem = params.lse + head * params.seqlen_q + first_row;
#pragma unroll
  for (int lane_row = 0; lane_row < Out::kLaneRows; ++lane_row) {
    const float sum = tile::quad_sum(softmax.sum[lane_row]);
    const float inverse = normalizer(sum);
    if constexpr (sizeof(Element) == 4) {
      out.for_row(lane_row, [&](float& value) { value = quotient(value, sum, inverse); });
    } else {
      out.scale_row(lane_row, inverse);
    }
    const int row = warp_first_row + Out::row_of(lane_row);
    if (tile::leads_quad() && row < rows) {
      ptx::store_global(lse_gmem + row, log_sum_exp(softmax.base[lane_row], sum));
    }
  }
  ptx::sync_cta();  // all warps have read queries, keys and values, whose place the output takes
  tile::put<typename Layout::OutTile>(shared, warp_first_row, out);
  ptx::sync_warp();  // the warp's rows are in place; no other warp reads them
  Element* out_gmem = head_of<Element>(params.out, params.out_strides, place.batch, place.head) +
                      first_row * params.out_strides.row;
  tile::store_rows<typename Layout::OutTile, Layout::kWarpRows, Config::kStoreBytes>(
      shared, warp_first_row, out_gmem, params.out_strides.row, params.out_strides.dim, rows, params.head_dim_v);
}

}  // namespace cuflash
