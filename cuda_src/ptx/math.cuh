// Arithmetic that is one instruction. The approximate forms flush denormals to zero.
#pragma once
#include "ptx/platform.cuh"

namespace cuflash::ptx {

// 2^x; -inf gives 0.
CUFLASH_DEVICE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x); 0 gives -inf.
CUFLASH_DEVICE float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

CUFLASH_DEVICE float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

CUFLASH_DEVICE float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
CUFLASH_DEVICE float mul(float a, float b) { return ::__fmul_rn(a, b); }  // rounded, whatever is done with it
CUFLASH_DEVICE float abs(float x) { return ::fabsf(x); }

// NaN if an operand is.
CUFLASH_DEVICE float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// A NaN operand is ignored unless both are NaN.
CUFLASH_DEVICE float max(float a, float b) { return ::fmaxf(a, b); }
CUFLASH_DEVICE float min(float a, float b) { return ::fminf(a, b); }

}  // namespace cuflash::ptx
