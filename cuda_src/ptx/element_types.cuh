// Conversions between float and the narrow types that hardware does in one instruction.
#pragma once
#include "ptx/platform.cuh"

namespace cuflash::ptx {

// Two floats to two 16-bit values, round to nearest even; lo lands in the low half.
template <class T>
CUFLASH_DEVICE uint32_t pack2(float lo, float hi) {
  uint32_t packed;
  if constexpr (is_bfloat16<T>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  }
  return packed;
}

CUFLASH_DEVICE float to_float(float value) { return value; }
CUFLASH_DEVICE float to_float(bfloat16 value) { return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }
CUFLASH_DEVICE float to_float(float16 value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

template <class T>
CUFLASH_DEVICE void unpack2(uint32_t packed, float& lo, float& hi) {
  if constexpr (is_bfloat16<T>) {
    lo = bit_cast<float>(packed << 16);
    hi = bit_cast<float>(packed & 0xffff0000u);
  } else {
    lo = to_float(float16{static_cast<uint16_t>(packed)});
    hi = to_float(float16{static_cast<uint16_t>(packed >> 16)});
  }
}

template <class T>
CUFLASH_DEVICE T from_float(float value) {
  return T{static_cast<uint16_t>(pack2<T>(value, 0.0f))};
}
template <>
CUFLASH_DEVICE float from_float<float>(float value) {
  return value;
}

// Keeps 10 mantissa bits (round to nearest, ties away); the 13 bits below them come out as zero (seen on an H200).
CUFLASH_DEVICE uint32_t to_tf32(float value) {
  uint32_t result;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(value));
  return result;
}

}  // namespace cuflash::ptx
