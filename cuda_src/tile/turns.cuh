// Warps that take turns over the 16-column tiles of one tile: warp w of n owns tiles w, w + n, w + 2 n ...
#pragma once
#include "ptx/memory.cuh"
#include "tile/fragment.cuh"
#include "tile/shared_tile.cuh"

namespace cuflash::tile {

// A column reader as operand of a product whose column (or row) tiles are those of one warp. Taking turns instead of
// neighbouring tiles keeps the swizzle a constant exclusive or, whatever the width of the tile.
template <class Reader, int kWarps>
struct Turns {
  Reader reader;

  CUFLASH_DEVICE Turns(uint32_t tile_smem, int warp) : reader(tile_smem, warp) {}
  CUFLASH_DEVICE Turns moved(uint32_t bytes) const {
    Turns turns = *this;
    turns.reader = reader.moved(bytes);
    return turns;
  }
  CUFLASH_DEVICE auto operator()(int tile, int step) const { return reader(tile * kWarps, step); }
};

// Rounds an accumulator into rows [first_row, first_row + 16 * kRowTiles) of a tile, into the columns of one warp. With
// kWarps = 1 these are side by side and may start at any `warp` that is a multiple of their number, a power of two.
template <class Tile, int kWarps, class C>
CUFLASH_DEVICE void put_turns(uint32_t tile_smem, int first_row, int warp, const C& c) {
  using Element = typename Tile::Element;
  static_assert(C::kColTiles * 8 * kWarps <= Tile::kCols, "the warps' columns fit the tile");
  constexpr int kChunks = sizeof(Element) / 2;  // of 8 columns
  const int lane = ptx::lane_index();
  const uint32_t lane_address = Tile::address(tile_smem, first_row + lane / 4, warp * 16 + lane % 4 * 2);
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The swizzle repeats every 8 rows, so that the pattern of the lane's first row serves all of them.
      const uint32_t row_address = lane_address + (m * 16 + half * 8) * Tile::kRowBytes;
#pragma unroll
      for (int n = 0; n < C::kColTiles; ++n) {
        const float left = c.values[m][n][2 * half], right = c.values[m][n][2 * half + 1];
        const uint32_t address = Tile::Pattern::advance(row_address, (n / 2 * kWarps * 2 + n % 2) * kChunks);
        if constexpr (sizeof(Element) == 2) {
          ptx::store_shared(address, ptx::pack2<Element>(left, right));
        } else {
          ptx::store_shared(address, f32x2{left, right});
        }
      }
    }
  }
}

}  // namespace cuflash::tile
