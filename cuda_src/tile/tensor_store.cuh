// The way of a warp's accumulators to global memory by the copy engine: rounded, through a slab tile in shared memory,
// in whole lines, while the warp goes on.
#pragma once
#include "ptx/barrier.cuh"
#include "ptx/element_types.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/special_registers.cuh"
#include "tile/slab_tile.cuh"
#include "tile/tensor_map.cuh"

namespace cuflash::tile {

inline constexpr int kStoreRows = 16;  // of a box: what one warp of a warpgroup holds

// Sends columns kFirst to kFirst + kCols of a warp's accumulators [16 rows, any number of columns], times factor, by way
// of rows first_row .. + 15 of a slab tile. The map has boxes of 64 columns and 16 rows; what lies outside the tensor is
// not stored. The caller's lane 0 waits for the copy before the tile is written again and before the block ends.
template <class Element, int kTileRows, int kCols, int kFirst = 0, int kCount>
CUFLASH_DEVICE void store_to_tensor(const float (&values)[kCount], float factor, uint32_t tile_smem, int first_row,
                                    const TensorMap* map, int row_gmem, int head, int batch) {
  static_assert(kFirst % kSlabCols == 0 && kFirst + kCols <= 2 * kCount, "whole slabs of what is there");
  using Tile = SlabTile<kTileRows, kCols>;
  const int lane = ptx::lane_index();
#pragma unroll
  for (int i = 0; i < kCols / 16; ++i) {
    uint32_t quad[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = kFirst / 2 + 8 * i + 2 * j;
      quad[j] = ptx::pack2<Element>(values[at] * factor, values[at + 1] * factor);
    }
    ptx::stmatrix_x4(Tile::address(tile_smem, first_row + lane % 16, 16 * i + lane / 16 * 8), quad);
  }
  ptx::fence_proxy_async();  // the copy engine is to see what the lanes have written
  ptx::sync_warp();
  if (lane == 0) {
#pragma unroll
    for (int slab = 0; slab < Tile::kSlabs; ++slab) {
      const uint32_t rows_smem = tile_smem + slab * Tile::kSlabBytes + first_row * kSlabRowBytes;
      ptx::tma_store_4d(map, rows_smem, kFirst + slab * kSlabCols, row_gmem, head, batch);
    }
    ptx::bulk_commit();
  }
}

}  // namespace cuflash::tile
