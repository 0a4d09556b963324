// dq = scale * accumulator: from float32 tiles in fragment order to rows of elements.
#pragma once
#include "attention/params_backward.cuh"
#include "attention/sequence.cuh"
#include "ptx/special_registers.cuh"
#include "tile/reduction_tile.cuh"
#include "tile/row_vector.cuh"

namespace cuflash {

template <class Config>
CUFLASH_DEVICE void store_dq_row(const FinishParams& params, typename Config::Element* row_gmem, int first_col,
                                 const float (&sums)[8]) {
  using Vector = tile::RowVector<typename Config::Element, Config::kCopyBytes>;
#pragma unroll
  for (int col = 0; col < 8; col += Vector::kElements) {
    Vector vector;
#pragma unroll
    for (int i = 0; i < Vector::kElements; ++i) vector.values[i] = sums[col + i] * params.grad_scale;
    if (first_col + col < params.head_dim) vector.store(row_gmem, params.dq_strides.dim, first_col + col);
  }
}

// One block: Config::kBlockQ rows of one head. A thread takes two rows, eight apart, of one 16 x 8 tile; neighbouring
// threads take neighbouring columns.
template <class Config>
CUFLASH_DEVICE void backward_finish(const FinishParams& params) {
  using Element = typename Config::Element;
  using Tile = tile::ReductionTile<Config::kReduceWidth>;
  constexpr int kTileCols = Config::kHeadDim / Tile::kCols;
  const auto [row_block, head, batch] = position_by_head(ptx::block_index(), params.num_row_blocks, params.num_q_heads);
  const int row_tiles = tile::ceil_div(params.seqlen_q, Tile::kRows);
  const int64_t first_tile = (static_cast<int64_t>(batch) * params.num_q_heads + head) * row_tiles;
  Element* dq_gmem = head_of<Element>(params.dq, params.dq_strides, batch, head);

#pragma unroll 2
  for (int item = ptx::thread_index(); item < Config::kBlockQ / 2 * kTileCols; item += Config::kWarps * 32) {
    const int tile_col = item % kTileCols;
    const int row_in_tile = item / kTileCols % 8;
    const int tile_row = row_block * (Config::kBlockQ / Tile::kRows) + item / kTileCols / 8;
    if (tile_row >= row_tiles) break;
    const int64_t tile = (first_tile + tile_row) * kTileCols + tile_col;
    float upper[8], lower[8];
    Tile::load_rows(params.dq_accumulator + tile * Tile::kFloats, row_in_tile, upper, lower);
    const int row = tile_row * Tile::kRows + row_in_tile;
    if (row < params.seqlen_q) {
      store_dq_row<Config>(params, dq_gmem + row * params.dq_strides.row, tile_col * Tile::kCols, upper);
    }
    if (row + 8 < params.seqlen_q) {
      store_dq_row<Config>(params, dq_gmem + (row + 8) * params.dq_strides.row, tile_col * Tile::kCols, lower);
    }
  }
}

}  // namespace cuflash
