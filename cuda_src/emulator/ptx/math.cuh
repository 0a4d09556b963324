// Host twin: arithmetic. More exact than the GPU's approximations; results below the normal range are flushed as there.
#pragma once
#include "ptx/platform.cuh"

namespace cuflash::ptx {

CUFLASH_DEVICE float flush_subnormal(float x) { return __builtin_fabsf(x) < 1.17549435e-38f ? x * 0.0f : x; }

CUFLASH_DEVICE float ex2(float x) { return flush_subnormal(__builtin_exp2f(x)); }
CUFLASH_DEVICE float lg2(float x) { return __builtin_log2f(flush_subnormal(x)); }
CUFLASH_DEVICE float rcp(float x) { return flush_subnormal(1.0f / flush_subnormal(x)); }

CUFLASH_DEVICE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
CUFLASH_DEVICE float mul(float a, float b) {
  volatile float product = a * b;  // kept from the compiler, which would fuse it with what follows
  return product;
}
CUFLASH_DEVICE float abs(float x) { return __builtin_fabsf(x); }
CUFLASH_DEVICE float max_nan(float a, float b) { return a != a || b != b ? a + b : __builtin_fmaxf(a, b); }
CUFLASH_DEVICE float max(float a, float b) { return __builtin_fmaxf(a, b); }
CUFLASH_DEVICE float min(float a, float b) { return __builtin_fminf(a, b); }

}  // namespace cuflash::ptx
