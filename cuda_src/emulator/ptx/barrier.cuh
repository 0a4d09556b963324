// Host twin: barriers of a block and of a warp.
#pragma once
#include "ptx/platform.cuh"

namespace cuflash::ptx {

CUFLASH_DEVICE void sync_cta(CUFLASH_CALLER) {
  emulator::barrier(0, static_cast<int>(emulator::thread_count()), true, CUFLASH_AT);
}
CUFLASH_DEVICE bool sync_cta_or(bool predicate, CUFLASH_CALLER) {
  return emulator::barrier_or(predicate, CUFLASH_AT);
}
CUFLASH_DEVICE void named_barrier_sync(int id, int thread_count, CUFLASH_CALLER) {
  emulator::barrier(id, thread_count, true, CUFLASH_AT);
}
CUFLASH_DEVICE void named_barrier_arrive(int id, int thread_count, CUFLASH_CALLER) {
  emulator::barrier(id, thread_count, false, CUFLASH_AT);
}
CUFLASH_DEVICE void sync_warp(CUFLASH_CALLER) { emulator::sync_warp(CUFLASH_AT); }

}  // namespace cuflash::ptx
