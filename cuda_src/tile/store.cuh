// From a warp's accumulator through shared memory to rows in global memory.
#pragma once
#include "ptx/memory.cuh"
#include "tile/fragment.cuh"
#include "tile/shared_tile.cuh"

namespace cuflash::tile {

// Rounds an accumulator into rows [first_row, first_row + 16 * kRowTiles) of a tile.
template <class Tile, class C>
CUFLASH_DEVICE void put(uint32_t tile_smem, int first_row, const C& c) {
  using Element = typename Tile::Element;
  static_assert(C::kColTiles * 8 == Tile::kCols, "the accumulator is as wide as the tile");
  const int lane = ptx::lane_index();
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The swizzle repeats every 8 rows, so that the pattern of the lane's first row serves all of them.
      const uint32_t lane_address = Tile::address(tile_smem, first_row + lane / 4, lane % 4 * 2);
      const uint32_t row_address = lane_address + (m * 16 + half * 8) * Tile::kRowBytes;
#pragma unroll
      for (int n = 0; n < C::kColTiles; ++n) {
        const float left = c.values[m][n][2 * half], right = c.values[m][n][2 * half + 1];
        if constexpr (sizeof(Element) == 2) {
          // Eight columns are one chunk; an odd chunk flips the bit that advance() reserves for the lane.
          const uint32_t address = Tile::Pattern::advance(row_address, n / 2 * 2) ^ (n % 2 * 16);
          ptx::store_shared(address, ptx::pack2<Element>(left, right));
        } else {
          ptx::store_shared(Tile::Pattern::advance(row_address, n * 2), f32x2{left, right});
        }
      }
    }
  }
}

// Copies rows [first_row, first_row + kRows) of a tile to global memory, by one warp, kStoreBytes an access: whole
// vectors of rows whose elements lie side by side, or single elements at any distance. matrix_gmem is the place of the
// tile's row 0; rows from `rows` on and columns from `cols` on do not exist there.
template <class Tile, int kRows, int kStoreBytes, class Element = typename Tile::Element>
CUFLASH_DEVICE void store_rows(uint32_t tile_smem, int first_row, Element* matrix_gmem, int64_t row_stride,
                               int64_t dim_stride, int rows, int cols) {
  constexpr int kPerAccess = kStoreBytes / static_cast<int>(sizeof(Element));
  constexpr int kPerRow = Tile::kCols / kPerAccess;
  struct alignas(kStoreBytes) Vector {
    Element elements[kPerAccess];
  };
#pragma unroll 4
  for (int i = ptx::lane_index(); i < kRows * kPerRow; i += 32) {
    const int row = first_row + i / kPerRow;
    const int col = i % kPerRow * kPerAccess;
    if (row >= rows || col >= cols) continue;
    const Vector vector = ptx::load_shared<Vector>(Tile::address(tile_smem, row, col));
    ptx::store_global(matrix_gmem + row * row_stride + (kPerAccess == 1 ? col * dim_stride : col), vector);
  }
}

}  // namespace cuflash::tile
