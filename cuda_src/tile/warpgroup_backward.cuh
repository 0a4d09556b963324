// What the backward needs of a warpgroup beyond the forward's two products: products that read a tile of d(scores) or
// of keys along its rows, and the ways of accumulators into shared memory and from there to global memory.
#pragma once
#include "ptx/barrier.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "tile/tensor_map.cuh"
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

// The same for packed words.
template <int kCount>
CUFLASH_DEVICE void store_words_in_register_order(const uint32_t (&words)[kCount], uint32_t smem) {
  const uint32_t mine = smem + ptx::thread_index() % kWarpgroupThreads * 16;
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    ptx::store_shared(mine + i * kWarpgroupThreads * 4, u32x4{words[i], words[i + 1], words[i + 2], words[i + 3]});
  }
}
template <int kCount>
CUFLASH_DEVICE void load_words_in_register_order(uint32_t (&words)[kCount], uint32_t smem) {
  const uint32_t mine = smem + ptx::thread_index() % kWarpgroupThreads * 16;
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const u32x4 four = ptx::load_shared<u32x4>(mine + i * kWarpgroupThreads * 4);
    words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
  }
}

// Sends a warp's accumulators [16 rows, kCols], times factor, to a tensor by way of rows first_row .. + 15 of a slab
// tile. The map has boxes of 64 columns and 16 rows; what lies outside the tensor is not stored. The caller's lane 0
// waits for the copy before the block ends.
template <class Element, int kRows, int kCols>
CUFLASH_DEVICE void store_to_tensor(const float (&values)[kCols / 2], float factor, uint32_t tile_smem, int first_row,
                                    const TensorMap* map, int row_gmem, int head, int batch) {
  using Tile = SlabTile<kRows, kCols>;
  const int lane = ptx::lane_index();
#pragma unroll
  for (int i = 0; i < kCols / 16; ++i) {
    uint32_t quad[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      quad[j] = ptx::pack2<Element>(values[8 * i + 2 * j] * factor, values[8 * i + 2 * j + 1] * factor);
    }
    ptx::stmatrix_x4(Tile::address(tile_smem, first_row + lane % 16, 16 * i + lane / 16 * 8), quad);
  }
  ptx::fence_proxy_async();  // the copy engine is to see what the lanes have written
  ptx::sync_warp();
  if (lane == 0) {
#pragma unroll
    for (int slab = 0; slab < Tile::kSlabs; ++slab) {
      const uint32_t rows_smem = tile_smem + slab * Tile::kSlabBytes + first_row * kSlabRowBytes;
      ptx::tma_store_4d(map, rows_smem, slab * kSlabCols, row_gmem, head, batch);
    }
    ptx::bulk_commit();
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
