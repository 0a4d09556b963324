// What the compiler differs in: how a kernel is declared, where dynamic shared memory begins.
#pragma once
#include "ptx/types.cuh"

#define CUFLASH_DEVICE __device__ __forceinline__

// One kernel, one parameter struct passed by value. The thread count is a compile-time promise: ptxas ignores
// setmaxnreg without it, and it caps the registers so that min_blocks blocks fit on one multiprocessor.
#define CUFLASH_KERNEL(name, threads, min_blocks, Params, params) \
  extern "C" __global__ __launch_bounds__(threads, min_blocks) void name(const __grid_constant__ Params params)

namespace cuflash::ptx {

template <class To, class From>
CUFLASH_DEVICE constexpr To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  return __builtin_bit_cast(To, from);
}

// The same value, of which the compiler knows nothing: it cannot move what is computed from it out of a loop.
CUFLASH_DEVICE int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

template <class T>
CUFLASH_DEVICE constexpr T min(T a, T b) {
  return b < a ? b : a;
}

template <class T>
CUFLASH_DEVICE constexpr T max(T a, T b) {
  return a < b ? b : a;
}

// 1024 bytes is the period of the widest swizzle: with this alignment a pattern made from addresses is a pattern
// made from offsets.
extern __shared__ __align__(1024) uint8_t dynamic_shared_bytes[];

// Address of the first byte of dynamic shared memory in the shared window.
CUFLASH_DEVICE uint32_t dynamic_shared() {
  uint64_t address;
  asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(dynamic_shared_bytes));
  return static_cast<uint32_t>(address);
}

}  // namespace cuflash::ptx
