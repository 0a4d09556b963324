// Host twin: warp-wide matrix products on registers.
#pragma once
#include "ptx/element_types.cuh"

namespace cuflash::ptx {

template <class T>
CUFLASH_DEVICE void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, CUFLASH_CALLER) {
  emulator::mma(is_bfloat16<T> ? emulator::MmaKind::bfloat16 : emulator::MmaKind::float16, c, a, b0, b1, CUFLASH_AT);
}

CUFLASH_DEVICE void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, CUFLASH_CALLER) {
  emulator::mma(emulator::MmaKind::tf32, c, a, b0, b1, CUFLASH_AT);
}

}  // namespace cuflash::ptx
