// A tile in the registers of one warp that knows the row and column of each of its elements.
#pragma once
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"
#include "tile/element.cuh"

namespace cuflash::tile {

// [16 * kRowTiles, 8 * kColTiles] float32 sums of products. A lane holds, of each 16 x 8 tile, four elements: two
// neighbouring columns in each of two rows that are 8 apart. The four lanes of a quad share their rows.
template <int kRowTiles_, int kColTiles_>
struct Accumulator {
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr int kColTiles = kColTiles_;
  static constexpr int kLaneRows = 2 * kRowTiles;  // rows of which a lane holds a part
  float values[kRowTiles][kColTiles][4];

  CUFLASH_DEVICE void clear() {
    for_each([](float& value, int, int, int) { value = 0.0f; });
  }

  // Calls visit(value, lane_row, row, col) for each element: lane_row counts this lane's rows, row and col are
  // positions in the tile.
  template <class Visit>
  CUFLASH_DEVICE void for_each(Visit visit) {
    const int lane = ptx::lane_index();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          visit(values[m][n][i], 2 * m + i / 2, m * 16 + i / 2 * 8 + lane / 4, n * 8 + lane % 4 * 2 + i % 2);
        }
      }
    }
  }

  // Position in the tile of one of this lane's rows.
  CUFLASH_DEVICE static int row_of(int lane_row) {
    return lane_row / 2 * 16 + lane_row % 2 * 8 + static_cast<int>(ptx::lane_index()) / 4;
  }

  CUFLASH_DEVICE void scale_row(int lane_row, float factor) {
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
      values[lane_row / 2][n][lane_row % 2 * 2] *= factor;
      values[lane_row / 2][n][lane_row % 2 * 2 + 1] *= factor;
    }
  }

  // The columns move `tiles` column tiles to the left; what falls off is lost. For loops that cannot be unrolled.
  CUFLASH_DEVICE void drop_columns(int tiles) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n + tiles < kColTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[m][n][i] = values[m][n + tiles][i];
      }
    }
  }

  // Columns [kDepth step, kDepth step + kDepth) of row tile m as the left operand of a product, without moving data:
  // the lane that holds two columns of a row also holds them as two depths. For float32 the two columns 2t and 2t + 1
  // take the places of depths t and t + 4, so the other operand's depth must be read in paired order.
  template <class Element>
  CUFLASH_DEVICE Operand<Element> operand(int m, int step) const {
    if constexpr (sizeof(Element) == 2) {
      const float(&left)[4] = values[m][2 * step];
      const float(&right)[4] = values[m][2 * step + 1];
      return {{ptx::pack2<Element>(left[0], left[1]), ptx::pack2<Element>(left[2], left[3]),
               ptx::pack2<Element>(right[0], right[1]), ptx::pack2<Element>(right[2], right[3])}};
    } else {
      const float(&tile)[4] = values[m][step];
      const uint32_t words[4] = {ptx::bit_cast<uint32_t>(tile[0]), ptx::bit_cast<uint32_t>(tile[2]),
                                 ptx::bit_cast<uint32_t>(tile[1]), ptx::bit_cast<uint32_t>(tile[3])};
      return Operand<Element>::from_words(words);
    }
  }
};

// Over the four lanes that share a row.
CUFLASH_DEVICE float quad_max(float value) {
  value = ptx::max(value, ptx::shuffle_xor(value, 1));
  return ptx::max(value, ptx::shuffle_xor(value, 2));
}
CUFLASH_DEVICE float quad_sum(float value) {
  value += ptx::shuffle_xor(value, 1);
  return value + ptx::shuffle_xor(value, 2);
}

// Whether this lane is the one of its quad that writes what the quad shares.
CUFLASH_DEVICE bool leads_quad() { return ptx::lane_index() % 4 == 0; }

}  // namespace cuflash::tile
