// Host twin: loads, stores and reductions, checked for bounds, alignment and order.
#pragma once
#include "ptx/platform.cuh"

namespace cuflash::ptx {

template <class T>
CUFLASH_DEVICE T load_shared(uint32_t address, CUFLASH_CALLER) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "access of 2, 4, 8 or 16 bytes");
  T value;
  emulator::load_shared(&value, address, sizeof(T), CUFLASH_AT);
  return value;
}

template <class T>
CUFLASH_DEVICE void store_shared(uint32_t address, const T& value, CUFLASH_CALLER) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "access of 2, 4, 8 or 16 bytes");
  emulator::store_shared(address, &value, sizeof(T), CUFLASH_AT);
}

template <class T>
CUFLASH_DEVICE T load_global(const void* pointer, CUFLASH_CALLER) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "access of 2, 4, 8 or 16 bytes");
  T value;
  emulator::load_global(&value, pointer, sizeof(T), CUFLASH_AT);
  return value;
}

template <class T>
CUFLASH_DEVICE void store_global(void* pointer, const T& value, CUFLASH_CALLER) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "access of 2, 4, 8 or 16 bytes");
  emulator::store_global(pointer, &value, sizeof(T), CUFLASH_AT);
}

CUFLASH_DEVICE void red_add(float* pointer, float value, CUFLASH_CALLER) {
  emulator::red_add(pointer, &value, 1, CUFLASH_AT);
}
CUFLASH_DEVICE void red_add_v2(float* pointer, f32x2 value, CUFLASH_CALLER) {
  emulator::red_add(pointer, &value.x, 2, CUFLASH_AT);
}
CUFLASH_DEVICE void red_add_v4(float* pointer, f32x4 value, CUFLASH_CALLER) {
  emulator::red_add(pointer, &value.x, 4, CUFLASH_AT);
}

CUFLASH_DEVICE uint32_t atomic_add(uint32_t* pointer, uint32_t value, CUFLASH_CALLER) {
  return emulator::atomic_add(pointer, value, CUFLASH_AT);
}
CUFLASH_DEVICE int32_t atomic_add(int32_t* pointer, int32_t value, CUFLASH_CALLER) {
  return static_cast<int32_t>(
      emulator::atomic_add(reinterpret_cast<uint32_t*>(pointer), static_cast<uint32_t>(value), CUFLASH_AT));
}

CUFLASH_DEVICE uint32_t load_acquire(const uint32_t* pointer, CUFLASH_CALLER) {
  return emulator::load_acquire(pointer, CUFLASH_AT);
}
CUFLASH_DEVICE void store_release(uint32_t* pointer, uint32_t value, CUFLASH_CALLER) {
  emulator::store_release(pointer, value, CUFLASH_AT);
}

// Blocks share their worker's memory or meet it through atomics: the host's own fence is enough.
CUFLASH_DEVICE void threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

}  // namespace cuflash::ptx
