// Who am I: the thread in its block and its warp, the block in its grid. Blocks and grids are one-dimensional.
#pragma once
#include "ptx/platform.cuh"

namespace cuflash::ptx {

CUFLASH_DEVICE uint32_t thread_index() { return threadIdx.x; }
CUFLASH_DEVICE uint32_t thread_count() { return blockDim.x; }
CUFLASH_DEVICE uint32_t block_index() { return blockIdx.x; }
// The same number from the machine once more: what is computed from it needs no registers between the two readings.
CUFLASH_DEVICE uint32_t block_index_again() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}
CUFLASH_DEVICE uint32_t grid_size() { return gridDim.x; }
CUFLASH_DEVICE uint32_t lane_index() { return threadIdx.x % 32; }

// The shuffle tells the compiler that the value is the same in all lanes: branches on it stay uniform.
CUFLASH_DEVICE uint32_t warp_index() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }

}  // namespace cuflash::ptx
