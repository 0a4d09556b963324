// Host twin: exchange of registers and votes. None of these orders memory.
#pragma once
#include "ptx/platform.cuh"

namespace cuflash::ptx {

template <class T>
CUFLASH_DEVICE T shuffle_index(T value, int lane, CUFLASH_CALLER) {
  static_assert(sizeof(T) == 4, "a shuffle moves 32 bits");
  return bit_cast<T>(emulator::shuffle(bit_cast<uint32_t>(value), lane, CUFLASH_AT));
}

template <class T>
CUFLASH_DEVICE T shuffle_xor(T value, int mask, CUFLASH_CALLER) {
  return shuffle_index(value, static_cast<int>(emulator::thread_index() % 32) ^ mask, file, line);
}

CUFLASH_DEVICE uint32_t ballot(bool predicate, CUFLASH_CALLER) { return emulator::ballot(predicate, CUFLASH_AT); }
CUFLASH_DEVICE bool vote_any(bool predicate, CUFLASH_CALLER) { return emulator::ballot(predicate, CUFLASH_AT) != 0; }
CUFLASH_DEVICE bool vote_all(bool predicate, CUFLASH_CALLER) {
  return emulator::ballot(predicate, CUFLASH_AT) == 0xffffffffu;
}

}  // namespace cuflash::ptx
