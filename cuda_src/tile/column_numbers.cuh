// Numbers that belong to the columns of an accumulator and wait for it in shared memory.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "tile/fragment.cuh"

namespace cuflash::tile {

// Copies kCount floats; both addresses are multiples of 16 bytes.
template <int kCount, int kThreads>
CUFLASH_DEVICE void copy_floats(uint32_t smem, const float* gmem) {
  static_assert(kCount % 4 == 0 && kCount / 4 <= kThreads, "one access a thread");
  const int first = static_cast<int>(ptx::thread_index()) * 4;
  if (first < kCount) ptx::cp_async<16>(smem + first * 4, gmem + first, 16);
}

// Walks over two accumulators of one shape with two numbers a column, x and y: visit(a, b, x, y, row, col). These are
// read as they are needed, so that few of them occupy registers.
template <class C, class Visit>
CUFLASH_DEVICE void zip_columns(C& a, C& b, uint32_t x_smem, uint32_t y_smem, Visit visit) {
  const int lane = ptx::lane_index();
#pragma unroll
  for (int n = 0; n < C::kColTiles; ++n) {
    const int col = n * 8 + lane % 4 * 2;
    const f32x2 x = ptx::load_shared<f32x2>(x_smem + col * 4);
    const f32x2 y = ptx::load_shared<f32x2>(y_smem + col * 4);
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        visit(a.values[m][n][i], b.values[m][n][i], i % 2 == 0 ? x.x : x.y, i % 2 == 0 ? y.x : y.y,
              m * 16 + i / 2 * 8 + lane / 4, col + i % 2);
      }
    }
  }
}

}  // namespace cuflash::tile
