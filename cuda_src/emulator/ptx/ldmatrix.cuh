// Host twin: 8x8 tiles of 16-bit elements between shared memory and fragments.
#pragma once
#include "ptx/platform.cuh"

namespace cuflash::ptx {

CUFLASH_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t address, CUFLASH_CALLER) {
  emulator::ldmatrix(r, 4, false, address, CUFLASH_AT);
}
CUFLASH_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address, CUFLASH_CALLER) {
  emulator::ldmatrix(r, 4, true, address, CUFLASH_AT);
}
CUFLASH_DEVICE void ldmatrix_x2(uint32_t (&r)[2], uint32_t address, CUFLASH_CALLER) {
  emulator::ldmatrix(r, 2, false, address, CUFLASH_AT);
}
CUFLASH_DEVICE void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t address, CUFLASH_CALLER) {
  emulator::ldmatrix(r, 2, true, address, CUFLASH_AT);
}
CUFLASH_DEVICE void stmatrix_x4(uint32_t address, const uint32_t (&r)[4], CUFLASH_CALLER) {
  emulator::stmatrix(address, r, 4, false, CUFLASH_AT);
}
CUFLASH_DEVICE void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4], CUFLASH_CALLER) {
  emulator::stmatrix(address, r, 4, true, CUFLASH_AT);
}

}  // namespace cuflash::ptx
