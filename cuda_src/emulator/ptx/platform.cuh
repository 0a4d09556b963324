// Host twin: how a kernel is declared, where dynamic shared memory begins.
#pragma once
#include "emulator/runtime/interface.h"
#include "ptx/types.cuh"

#define CUFLASH_DEVICE inline __attribute__((always_inline))

// Trailing default arguments of every primitive: the line that called it.
#define CUFLASH_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define CUFLASH_AT ::cuflash::emulator::Location{file, line}

// The library exports the kernel, the size of its parameters and its thread count; the launcher compares both.
#define CUFLASH_EXPORT extern "C" __attribute__((visibility("default")))
#define CUFLASH_KERNEL(name, threads, min_blocks, Params, params)                                              \
  static void name##_body(const Params& params);                                                              \
  CUFLASH_EXPORT void name(const void* bytes) { name##_body(*static_cast<const Params*>(bytes)); }            \
  CUFLASH_EXPORT unsigned name##_param_bytes() { return sizeof(Params); }                                     \
  CUFLASH_EXPORT unsigned name##_max_threads() { return threads; }                                            \
  static void name##_body(const Params& params)

namespace cuflash::ptx {

template <class To, class From>
CUFLASH_DEVICE constexpr To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  return __builtin_bit_cast(To, from);
}

// The same value, of which the compiler knows nothing: it cannot move what is computed from it out of a loop.
CUFLASH_DEVICE int opaque(int value) {
  return value;
}

inline constexpr float kInfinity = __builtin_huge_valf();

template <class T>
CUFLASH_DEVICE constexpr T min(T a, T b) {
  return b < a ? b : a;
}

template <class T>
CUFLASH_DEVICE constexpr T max(T a, T b) {
  return a < b ? b : a;
}

CUFLASH_DEVICE uint32_t dynamic_shared() { return emulator::kSharedBase; }

}  // namespace cuflash::ptx
