// The two products of attention on one warpgroup: scores from two tiles in shared memory, and the accumulation of
// probabilities in registers times a tile in shared memory. Both only start the work: the caller commits to a wait.
#pragma once
#include "ptx/wgmma.cuh"
#include "tile/slab_tile.cuh"

namespace cuflash::tile {

inline constexpr int kWarpgroupRows = 64;
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kProductDepth = 16;  // columns of A and rows of B that one instruction multiplies

// scores [64, kKeys] = q [64 rows of a kBlockQ-row tile, kDim] * k^T, k [kKeys, kDim]; rows of both lie along kDim.
template <class Element, int kBlockQ, int kKeys, int kDim>
CUFLASH_DEVICE void start_scores(float (&scores)[kKeys / 2], uint32_t q_rows_smem, uint32_t k_smem) {
  static_assert(kDim % kProductDepth == 0 && kKeys % 8 == 0, "whole products");
  constexpr int kStepsPerSlab = kSlabCols / kProductDepth;
  const uint64_t q = slab_descriptor(q_rows_smem, kSlabRowBytes);
  const uint64_t k = slab_descriptor(k_smem, kSlabRowBytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kDim / kProductDepth; ++step) {
    const int slab = step / kStepsPerSlab, within = step % kStepsPerSlab * kProductDepth * 2;
    const uint64_t q_step = descriptor_step(slab * SlabTile<kBlockQ, kDim>::kSlabBytes + within);
    const uint64_t k_step = descriptor_step(slab * SlabTile<kKeys, kDim>::kSlabBytes + within);
    ptx::wgmma_m64k16_ss<Element, kKeys, 0, 0>(scores, q + q_step, k + k_step, step != 0);
  }
  ptx::wgmma_commit();
}

// out [64, kDimV] += probs [64, kKeys] * v [kKeys, kDimV]. The rows of v lie along kDimV, the N side: wgmma reads them
// transposed, and the leading distance leads from one slab of 64 columns to the next.
template <class Element, int kKeys, int kDimV>
CUFLASH_DEVICE void start_output(float (&out)[kDimV / 2], const uint32_t (&probs)[kKeys / 4], uint32_t v_smem) {
  static_assert(kKeys % kProductDepth == 0 && kDimV % 8 == 0, "whole products");
  const uint64_t v = slab_descriptor(v_smem, SlabTile<kKeys, kDimV>::kSlabBytes);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKeys / kProductDepth; ++step) {
    const uint64_t v_step = descriptor_step(step * kProductDepth * kSlabRowBytes);
    ptx::wgmma_m64k16_rs<Element, kDimV, 1>(out, probs + 4 * step, v + v_step, true);
  }
  ptx::wgmma_commit();
}

}  // namespace cuflash::tile
