// Host twin: barriers in shared memory that count arriving threads and bytes.
#pragma once
#include "ptx/platform.cuh"

namespace cuflash::ptx {

CUFLASH_DEVICE void mbarrier_init(uint32_t barrier, uint32_t arrivals, CUFLASH_CALLER) {
  emulator::mbarrier_init(barrier, arrivals, CUFLASH_AT);
}
CUFLASH_DEVICE void mbarrier_init_fence() { emulator::mbarrier_init_fence(); }
CUFLASH_DEVICE void mbarrier_arrive(uint32_t barrier, CUFLASH_CALLER) {
  emulator::mbarrier_arrive(barrier, 0, CUFLASH_AT);
}
CUFLASH_DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes, CUFLASH_CALLER) {
  emulator::mbarrier_arrive(barrier, bytes, CUFLASH_AT);
}
CUFLASH_DEVICE bool mbarrier_test(uint32_t barrier, uint32_t parity, CUFLASH_CALLER) {
  return emulator::mbarrier_test(barrier, parity, CUFLASH_AT);
}
CUFLASH_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity, CUFLASH_CALLER) {
  emulator::mbarrier_wait(barrier, parity, CUFLASH_AT);
}

}  // namespace cuflash::ptx
