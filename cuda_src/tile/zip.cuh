// Walks over two accumulators of one shape, element by element.
#pragma once
#include "tile/fragment.cuh"

namespace cuflash::tile {

// Calls visit(a, b, lane_row, row, col) for each pair of elements: see Accumulator::for_each.
template <class C, class Visit>
CUFLASH_DEVICE void zip(C& a, C& b, Visit visit) {
  const int lane = ptx::lane_index();
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < C::kColTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        visit(a.values[m][n][i], b.values[m][n][i], 2 * m + i / 2, m * 16 + i / 2 * 8 + lane / 4,
              n * 8 + lane % 4 * 2 + i % 2);
      }
    }
  }
}

}  // namespace cuflash::tile
