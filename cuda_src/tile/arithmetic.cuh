// Real numbers and positions as the algorithm sees them: its only way down to the machine's arithmetic.
#pragma once
#include "ptx/math.cuh"
#include "ptx/memory.cuh"

namespace cuflash {
using ptx::kInfinity;
inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
}  // namespace cuflash

namespace cuflash::tile {

CUFLASH_DEVICE float exp2(float x) { return ptx::ex2(x); }             // 2^-inf is 0
CUFLASH_DEVICE float log2(float x) { return ptx::lg2(x); }             // of 0: -inf
CUFLASH_DEVICE float reciprocal(float x) { return ptx::rcp(x); }
CUFLASH_DEVICE float fma(float a, float b, float c) { return ptx::fma(a, b, c); }
CUFLASH_DEVICE float rounded_product(float a, float b) { return ptx::mul(a, b); }
CUFLASH_DEVICE float magnitude(float x) { return ptx::abs(x); }
CUFLASH_DEVICE float larger(float a, float b) { return ptx::max(a, b); }  // a NaN loses against a number
CUFLASH_DEVICE int larger(int a, int b) { return ptx::max(a, b); }
CUFLASH_DEVICE int smaller(int a, int b) { return ptx::min(a, b); }
CUFLASH_DEVICE int clamp(int x, int low, int high) { return smaller(larger(x, low), high); }
CUFLASH_DEVICE float read(const float* gmem) { return ptx::load_global<float>(gmem); }

CUFLASH_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace cuflash::tile
