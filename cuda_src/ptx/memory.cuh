// Loads, stores and reductions. Shared memory is addressed by 32-bit numbers, global memory by pointers.
#pragma once
#include "ptx/platform.cuh"

namespace cuflash::ptx {

// All forms are volatile so that they keep their order against barriers, which are volatile too.
template <class T>
CUFLASH_DEVICE T load_shared(uint32_t address) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "access of 2, 4, 8 or 16 bytes");
  if constexpr (sizeof(T) == 2) {
    uint16_t v;
    asm volatile("ld.shared.b16 %0, [%1];" : "=h"(v) : "r"(address));
    return bit_cast<T>(v);
  } else if constexpr (sizeof(T) == 4) {
    uint32_t v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address));
    return bit_cast<T>(v);
  } else if constexpr (sizeof(T) == 8) {
    u32x2 v;
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
    return bit_cast<T>(v);
  } else {
    u32x4 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return bit_cast<T>(v);
  }
}

template <class T>
CUFLASH_DEVICE void store_shared(uint32_t address, const T& value) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "access of 2, 4, 8 or 16 bytes");
  if constexpr (sizeof(T) == 2) {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(bit_cast<uint16_t>(value)) : "memory");
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(bit_cast<uint32_t>(value)) : "memory");
  } else if constexpr (sizeof(T) == 8) {
    const u32x2 v = bit_cast<u32x2>(value);
    asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
  } else {
    const u32x4 v = bit_cast<u32x4>(value);
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
  }
}

template <class T>
CUFLASH_DEVICE T load_global(const void* pointer) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "access of 2, 4, 8 or 16 bytes");
  if constexpr (sizeof(T) == 2) {
    uint16_t v;
    asm volatile("ld.global.b16 %0, [%1];" : "=h"(v) : "l"(pointer));
    return bit_cast<T>(v);
  } else if constexpr (sizeof(T) == 4) {
    uint32_t v;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(v) : "l"(pointer));
    return bit_cast<T>(v);
  } else if constexpr (sizeof(T) == 8) {
    u32x2 v;
    asm volatile("ld.global.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(pointer));
    return bit_cast<T>(v);
  } else {
    u32x4 v;
    asm volatile("ld.global.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(pointer));
    return bit_cast<T>(v);
  }
}

template <class T>
CUFLASH_DEVICE void store_global(void* pointer, const T& value) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "access of 2, 4, 8 or 16 bytes");
  if constexpr (sizeof(T) == 2) {
    asm volatile("st.global.b16 [%0], %1;" ::"l"(pointer), "h"(bit_cast<uint16_t>(value)) : "memory");
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("st.global.b32 [%0], %1;" ::"l"(pointer), "r"(bit_cast<uint32_t>(value)) : "memory");
  } else if constexpr (sizeof(T) == 8) {
    const u32x2 v = bit_cast<u32x2>(value);
    asm volatile("st.global.v2.b32 [%0], {%1,%2};" ::"l"(pointer), "r"(v.x), "r"(v.y) : "memory");
  } else {
    const u32x4 v = bit_cast<u32x4>(value);
    asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(pointer), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
  }
}

CUFLASH_DEVICE void red_add(float* pointer, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(pointer), "f"(value) : "memory");
}

// Vector reductions exist since sm_90; they need 8- and 16-byte aligned pointers, here on every target.
CUFLASH_DEVICE void red_add_v2(float* pointer, f32x2 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1,%2};" ::"l"(pointer), "f"(value.x), "f"(value.y) : "memory");
#else
  red_add(pointer, value.x);
  red_add(pointer + 1, value.y);
#endif
}

CUFLASH_DEVICE void red_add_v4(float* pointer, f32x4 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(pointer), "f"(value.x), "f"(value.y), "f"(value.z),
               "f"(value.w) : "memory");
#else
  red_add_v2(pointer, {value.x, value.y});
  red_add_v2(pointer + 2, {value.z, value.w});
#endif
}

// Returns the value before the addition.
CUFLASH_DEVICE uint32_t atomic_add(uint32_t* pointer, uint32_t value) {
  uint32_t old;
  asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(pointer), "r"(value) : "memory");
  return old;
}
CUFLASH_DEVICE int32_t atomic_add(int32_t* pointer, int32_t value) {
  return static_cast<int32_t>(atomic_add(reinterpret_cast<uint32_t*>(pointer), static_cast<uint32_t>(value)));
}

// Between blocks: who reads a released value sees all that its writer had written or seen before.
CUFLASH_DEVICE uint32_t load_acquire(const uint32_t* pointer) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}
CUFLASH_DEVICE void store_release(uint32_t* pointer, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

// Orders this thread's global writes before its later ones, as seen by every block of the device.
CUFLASH_DEVICE void threadfence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

}  // namespace cuflash::ptx
