// Barriers of a block and of a warp: they order shared memory between the threads that take part.
#pragma once
#include "ptx/platform.cuh"

namespace cuflash::ptx {

CUFLASH_DEVICE void sync_cta() { asm volatile("bar.sync 0;" ::: "memory"); }

// sync_cta that also tells every thread whether the predicate holds in any thread of the block.
CUFLASH_DEVICE bool sync_cta_or(bool predicate) { return __syncthreads_or(predicate) != 0; }

// Ids 1 to 15; id 0 belongs to sync_cta. thread_count counts waiting and arriving threads, in multiples of 32.
CUFLASH_DEVICE void named_barrier_sync(int id, int thread_count) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(thread_count) : "memory");
}
CUFLASH_DEVICE void named_barrier_arrive(int id, int thread_count) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(thread_count) : "memory");
}

CUFLASH_DEVICE void sync_warp() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

}  // namespace cuflash::ptx
