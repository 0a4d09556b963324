// Host twin: matrix products of a warpgroup, computed when they are waited for.
#pragma once
#include "ptx/element_types.cuh"

namespace cuflash::ptx {

CUFLASH_DEVICE void wgmma_fence(CUFLASH_CALLER) { emulator::wgmma_fence(CUFLASH_AT); }
CUFLASH_DEVICE void wgmma_commit(CUFLASH_CALLER) { emulator::wgmma_commit(CUFLASH_AT); }
template <int Groups>
CUFLASH_DEVICE void wgmma_wait(CUFLASH_CALLER) {
  emulator::wgmma_wait(Groups, CUFLASH_AT);
}
template <int Count>
CUFLASH_DEVICE void wgmma_touch(float (&)[Count]) {}

template <class T, int N, int TransA, int TransB>
CUFLASH_DEVICE void wgmma_m64k16_ss(float (&d)[N / 2], uint64_t desc_a, uint64_t desc_b, bool accumulate,
                                    CUFLASH_CALLER) {
  static_assert(N % 8 == 0 && N >= 8 && N <= 256, "N is a multiple of 8 up to 256");
  emulator::wgmma(is_bfloat16<T>, N, d, nullptr, desc_a, desc_b, accumulate, TransA, TransB, CUFLASH_AT);
}
template <class T, int N, int TransB>
CUFLASH_DEVICE void wgmma_m64k16_rs(float (&d)[N / 2], const uint32_t* a, uint64_t desc_b, bool accumulate,
                                    CUFLASH_CALLER) {
  static_assert(N % 8 == 0 && N >= 8 && N <= 256, "N is a multiple of 8 up to 256");
  emulator::wgmma(is_bfloat16<T>, N, d, a, 0, desc_b, accumulate, false, TransB, CUFLASH_AT);
}

}  // namespace cuflash::ptx
