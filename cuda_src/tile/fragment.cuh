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

  // Column of this lane in each column tile; the next one is its other.
  CUFLASH_DEVICE static int first_col() { return static_cast<int>(ptx::lane_index()) % 4 * 2; }

  // Position in the tile of one of this lane's rows.
  CUFLASH_DEVICE static int row_of(int lane_row) {
    return lane_row / 2 * 16 + lane_row % 2 * 8 + static_cast<int>(ptx::lane_index()) / 4;
  }

  // Calls visit(value) for this lane's elements of one of its rows.
  template <class Visit>
  CUFLASH_DEVICE void for_row(int lane_row, Visit visit) {
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
      visit(values[lane_row / 2][n][lane_row % 2 * 2]);
      visit(values[lane_row / 2][n][lane_row % 2 * 2 + 1]);
    }
  }

  CUFLASH_DEVICE void scale_row(int lane_row, float factor) {
    for_row(lane_row, [&](float& value) { value *= factor; });
  }

  // Columns [kDepth step, kDepth step + kDepth) of row tile m as the registers of a left operand,
  // without moving data: the lane that holds two columns of a row also holds them as two depths. For float32 the two
  // columns 2t and 2t + 1 take the places of depths t and t + 4, so the other operand's depth must be read in paired
  // order.
  template <class Element>
  CUFLASH_DEVICE Fragment<Element> fragment(int m, int step) const {
    Fragment<Element> fragment;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(Element) == 2) {
        const float(&tile)[4] = values[m][2 * step + i / 2];
        fragment.words[i] = ptx::pack2<Element>(tile[i % 2 * 2], tile[i % 2 * 2 + 1]);
      } else {
        fragment.words[i] = ptx::bit_cast<uint32_t>(values[m][step][i % 2 * 2 + i / 2]);
      }
    }
    return fragment;
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
