// Exchange of registers and votes between the 32 lanes of a full warp. None of these orders memory.
#pragma once
#include "ptx/platform.cuh"

namespace cuflash::ptx {

template <class T>
CUFLASH_DEVICE T shuffle_xor(T value, int mask) {
  static_assert(sizeof(T) == 4, "a shuffle moves 32 bits");
  return bit_cast<T>(__shfl_xor_sync(0xffffffffu, bit_cast<uint32_t>(value), mask));
}

template <class T>
CUFLASH_DEVICE T shuffle_index(T value, int lane) {
  static_assert(sizeof(T) == 4, "a shuffle moves 32 bits");
  return bit_cast<T>(__shfl_sync(0xffffffffu, bit_cast<uint32_t>(value), lane));
}

CUFLASH_DEVICE bool vote_any(bool predicate) { return __any_sync(0xffffffffu, predicate) != 0; }
CUFLASH_DEVICE bool vote_all(bool predicate) { return __all_sync(0xffffffffu, predicate) != 0; }
CUFLASH_DEVICE uint32_t ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }

}  // namespace cuflash::ptx
