// Host twin: asynchronous copies, made as late as the program allows: when their group is waited for.
#pragma once
#include "ptx/platform.cuh"

namespace cuflash::ptx {

template <int Bytes>
CUFLASH_DEVICE void cp_async(uint32_t dst, const void* src, int valid_bytes, CUFLASH_CALLER) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async moves 4, 8 or 16 bytes");
  emulator::cp_async(dst, src, Bytes, valid_bytes, CUFLASH_AT);
}

CUFLASH_DEVICE void cp_async_commit() { emulator::cp_async_commit(); }

template <int Groups>
CUFLASH_DEVICE void cp_async_wait(CUFLASH_CALLER) {
  emulator::cp_async_wait(Groups, CUFLASH_AT);
}

}  // namespace cuflash::ptx
