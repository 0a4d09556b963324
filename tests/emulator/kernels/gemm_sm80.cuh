// C = A * B^T by 64x64 tiles with two stages of cp.async, swizzled shared tiles, ldmatrix and mma. A is [m, depth],
// B is [n, depth] and C is [m, n]; depth is a multiple of 64, m and n are free. Each fault breaks one line of it.
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/special_registers.cuh"

using namespace cuflash;

enum class Fault { none, missing_barrier, missing_wait, past_the_tail, swapped_fragment, no_swizzle };

constexpr int kTile = 64, kRowBytes = 128, kTileBytes = kTile * kRowBytes;

template <Fault kFault>
CUFLASH_DEVICE uint32_t tile_offset(int row, int chunk) {
  return row * kRowBytes + (kFault == Fault::no_swizzle ? chunk : chunk ^ (row & 7)) * 16;
}

template <Fault kFault>
CUFLASH_DEVICE void load_tile(uint32_t tile_smem, const unsigned char* from, int first_row, int rows, int64_t pitch) {
  for (int i = static_cast<int>(ptx::thread_index()); i < kTile * 8; i += 128) {
    const int row = i / 8, chunk = i % 8;
    const bool inside = kFault == Fault::past_the_tail || first_row + row < rows;
    ptx::cp_async<16>(tile_smem + tile_offset<kFault>(row, chunk), from + (first_row + row) * pitch + chunk * 16,
                      inside ? 16 : 0);
  }
}

// in[0] A, in[1] B, out C in float; n: m, n, depth, blocks along n.
template <class T, Fault kFault>
CUFLASH_DEVICE void gemm(const TestParams& params) {
  const int rows = static_cast<int>(params.n[0]), columns = static_cast<int>(params.n[1]);
  const int steps = static_cast<int>(params.n[2]) / kTile;
  const int64_t pitch = params.n[2] * 2;
  const int row0 = static_cast<int>(ptx::block_index() / params.n[3]) * kTile;
  const int column0 = static_cast<int>(ptx::block_index() % params.n[3]) * kTile;
  const int lane = static_cast<int>(ptx::lane_index()), warp = static_cast<int>(ptx::warp_index());
  const uint32_t a_smem = ptx::dynamic_shared(), b_smem = a_smem + 2 * kTileBytes;
  const auto load_step = [&](int step) {
    const uint32_t stage = (step & 1) * kTileBytes;
    load_tile<kFault>(a_smem + stage, params.in[0] + step * kRowBytes, row0, rows, pitch);
    load_tile<kFault>(b_smem + stage, params.in[1] + step * kRowBytes, column0, columns, pitch);
  };
  float c[8][4] = {};
  load_step(0);
  ptx::cp_async_commit();
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) load_step(step + 1);
    ptx::cp_async_commit();
    if constexpr (kFault != Fault::missing_wait) ptx::cp_async_wait<1>();
    if constexpr (kFault != Fault::missing_barrier) ptx::sync_cta();  // everybody's part of this stage has arrived
    const uint32_t a_tile = a_smem + (step & 1) * kTileBytes, b_tile = b_smem + (step & 1) * kTileBytes;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t a[4];
      ptx::ldmatrix_x4(a, a_tile + tile_offset<kFault>(warp * 16 + lane % 16, k * 2 + lane / 16));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, b_tile + tile_offset<kFault>(j * 16 + lane % 8 + lane / 16 * 8, k * 2 + lane / 8 % 2));
        const bool swapped = kFault == Fault::swapped_fragment;
        ptx::mma_m16n8k16<T>(c[2 * j], a, b[0], swapped ? b[2] : b[1]);
        ptx::mma_m16n8k16<T>(c[2 * j + 1], a, swapped ? b[1] : b[2], b[3]);
      }
    }
    ptx::sync_cta();  // everybody has read this stage; the next load may overwrite it
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = row0 + warp * 16 + lane / 4 + e / 2 * 8, column = column0 + j * 8 + lane % 4 * 2 + e % 2;
      if (row >= rows || column >= columns) continue;
      ptx::store_global(params.out + (int64_t{row} * columns + column) * 4, c[j][e]);
    }
  }
}
