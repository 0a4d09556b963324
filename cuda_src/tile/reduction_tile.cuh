// 16 x 8 tiles of a float32 accumulator in global memory, stored in the order in which mma fragments lie in registers.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace cuflash::tile {

// Row-major storage would make every warp-wide reduction touch 16 half-used sectors. In fragment order one reduction
// covers 512 (Width 4) or 128 (Width 1) neighbouring bytes. Width 4 needs the vector reductions of sm_90; without them
// Width 1 keeps the 32 lanes of each scalar reduction side by side.
template <int Width>
struct ReductionTile {
  static_assert(Width == 1 || Width == 4, "a fragment holds four floats: reduce them one by one or together");
  static constexpr int kRows = 16;
  static constexpr int kCols = 8;
  static constexpr int kFloats = kRows * kCols;

  // Adds a warp's fragment: rows lane/4 and lane/4 + 8, columns 2 * (lane%4) and the next.
  CUFLASH_DEVICE static void add(float* tile_gmem, const float (&fragment)[4]) {
    const uint32_t lane = ptx::lane_index();
    if constexpr (Width == 4) {
      ptx::red_add_v4(tile_gmem + lane * 4, {fragment[0], fragment[1], fragment[2], fragment[3]});
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) ptx::red_add(tile_gmem + i * 32 + lane, fragment[i]);
    }
  }

  // Reads rows `row` and `row + 8`, row in 0..7, in the order of their columns.
  CUFLASH_DEVICE static void load_rows(const float* tile_gmem, int row, float (&upper)[kCols], float (&lower)[kCols]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (Width == 4) {
        const f32x4 quad = ptx::load_global<f32x4>(tile_gmem + row * 16 + i * 4);
        upper[2 * i] = quad.x;
        upper[2 * i + 1] = quad.y;
        lower[2 * i] = quad.z;
        lower[2 * i + 1] = quad.w;
      } else {
        const f32x4 plane = ptx::load_global<f32x4>(tile_gmem + i * 32 + row * 4);
        float(&out)[kCols] = i < 2 ? upper : lower;
        out[i % 2] = plane.x;
        out[i % 2 + 2] = plane.y;
        out[i % 2 + 4] = plane.z;
        out[i % 2 + 6] = plane.w;
      }
    }
  }
};

}  // namespace cuflash::tile
