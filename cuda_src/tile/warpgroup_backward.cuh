// What the backward needs of a warpgroup beyond the forward's two products: products that read a tile of d(scores) or
// of keys along its rows, and the ways of accumulators into shared memory and from there to global memory.
#pragma once
#include "ptx/barrier.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "tile/tensor_store.cuh"
#include "tile/warpgroup_fragment.cuh"
#include "tile/warpgroup_gemm.cuh"

namespace cuflash::tile {

// dq [64, kCols] = d_scores [64 rows of a kRows-row tile, kKeys] * k [kKeys, kCols from the slab at k_smem].
template <class Element, int kRows, int kKeys, int kCols>
CUFLASH_DEVICE void start_rows_times_keys(float (&dq)[kCols / 2], uint32_t rows_smem, uint32_t k_smem) {
  constexpr int kStepsPerSlab = kSlabCols / kProductDepth;
  const uint64_t rows = slab_descriptor(rows_smem, kSlabRowBytes);
  const uint64_t k = slab_descriptor(k_smem, kKeys * kSlabRowBytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKeys / kProductDepth; ++step) {
    const int slab = step / kStepsPerSlab, within = step % kStepsPerSlab * kProductDepth * 2;
    const uint64_t row_step = descriptor_step(slab * SlabTile<kRows, kKeys>::kSlabBytes + within);
    const uint64_t key_step = descriptor_step(step * kProductDepth * kSlabRowBytes);
    ptx::wgmma_m64k16_ss<Element, kCols, 0, 1>(dq, rows + row_step, k + key_step, step != 0);
  }
  ptx::wgmma_commit();
}

// dq^T [64, kRows] = k^T [64 columns of the slab at k_smem, kKeys] * d_scores^T, d_scores [kRows, kKeys].
template <class Element, int kRows, int kKeys>
CUFLASH_DEVICE void start_keys_times_rows(float (&dq)[kRows / 2], uint32_t k_smem, uint32_t rows_smem) {
  constexpr int kStepsPerSlab = kSlabCols / kProductDepth;
  const uint64_t k = slab_descriptor(k_smem, kKeys * kSlabRowBytes);
  const uint64_t rows = slab_descriptor(rows_smem, kSlabRowBytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKeys / kProductDepth; ++step) {
    const int slab = step / kStepsPerSlab, within = step % kStepsPerSlab * kProductDepth * 2;
    const uint64_t key_step = descriptor_step(step * kProductDepth * kSlabRowBytes);
    const uint64_t row_step = descriptor_step(slab * SlabTile<kRows, kKeys>::kSlabBytes + within);
    ptx::wgmma_m64k16_ss<Element, kRows, 1, 0>(dq, k + key_step, rows + row_step, step != 0);
  }
  ptx::wgmma_commit();
}

// A warp's packed accumulators of keys times queries, [16 keys, kRows queries], become columns first_key .. + 15 of the
// tile [kRows, kKeys].
template <int kRows, int kKeys>
CUFLASH_DEVICE void store_transposed(const uint32_t (&packed)[kRows / 4], uint32_t tile_smem, int first_key) {
  const int lane = ptx::lane_index();
  const int row = lane % 8 + lane / 16 * 8;
  const int col = first_key + lane / 8 % 2 * 8;
#pragma unroll
  for (int i = 0; i < kRows / 16; ++i) {
    const uint32_t quad[4] = {packed[4 * i], packed[4 * i + 1], packed[4 * i + 2], packed[4 * i + 3]};
    ptx::stmatrix_x4_trans(SlabTile<kRows, kKeys>::address(tile_smem, row + 16 * i, col), quad);
  }
}

// Accumulators in the order of the registers: chunk after chunk of 128 threads with 16 bytes each. Whoever reads them
// back knows the fragment; nobody else does.
template <int kCount>
CUFLASH_DEVICE void store_in_register_order(const float (&values)[kCount], uint32_t smem) {
  const uint32_t mine = smem + ptx::thread_index() % kWarpgroupThreads * 16;
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    ptx::store_shared(mine + i * kWarpgroupThreads * 4, f32x4{values[i], values[i + 1], values[i + 2], values[i + 3]});
  }
}

template <int kCount>
CUFLASH_DEVICE void load_in_register_order(float (&values)[kCount], uint32_t smem) {
  const uint32_t mine = smem + ptx::thread_index() % kWarpgroupThreads * 16;
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const f32x4 four = ptx::load_shared<f32x4>(mine + i * kWarpgroupThreads * 4);
    values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
  }
}

// A pair of elements without its infinities and NaNs, which become zeros.
template <class Element>
CUFLASH_DEVICE uint32_t finite_pair(uint32_t pair) {
  constexpr uint32_t kExponent = ptx::is_bfloat16<Element> ? 0x7f80 : 0x7c00;
  const bool low = (pair & kExponent) == kExponent, high = (pair >> 16 & kExponent) == kExponent;
  return pair & ((low ? 0u : 0xffffu) | (high ? 0u : 0xffff0000u));
}

// Clears the infinities and NaNs of kBytes of elements; kThreads threads share the work. Zero times such a value would
// be NaN in a product that sums over the rows of the tile, for rows of the result that have nothing to do with it.
template <class Element, int kBytes, int kThreads>
CUFLASH_DEVICE void clear_nonfinite(uint32_t smem, int thread) {
  static_assert(kBytes % 16 == 0, "whole accesses");
#pragma unroll 4
  for (uint32_t address = smem + thread * 16; address < smem + kBytes; address += kThreads * 16) {
    const u32x4 old = ptx::load_shared<u32x4>(address);
    const u32x4 now = {finite_pair<Element>(old.x), finite_pair<Element>(old.y), finite_pair<Element>(old.z),
                       finite_pair<Element>(old.w)};
    if ((now.x ^ old.x) | (now.y ^ old.y) | (now.z ^ old.z) | (now.w ^ old.w)) ptx::store_shared(address, now);
  }
}

// A tile's worth of boxes of 64 columns: one load a slab, all reporting to the same barrier.
template <int kRows, int kCols>
CUFLASH_DEVICE void load_slabs(uint32_t tile_smem, const TensorMap* map, uint32_t barrier, int row, int head,
                               int batch) {
  using Tile = SlabTile<kRows, kCols>;
#pragma unroll
  for (int slab = 0; slab < Tile::kSlabs; ++slab) {
    ptx::tma_load_4d(tile_smem + slab * Tile::kSlabBytes, map, barrier, slab * kSlabCols, row, head, batch);
  }
}

}  // namespace cuflash::tile
