// Conversions between float and 16-bit floating point, bit by bit, rounding to nearest even as the GPU does.
#pragma once
#include "ptx/types.cuh"

namespace cuflash::emulator {

inline float float_from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t bits_from_float(float value) { return __builtin_bit_cast(uint32_t, value); }

inline uint16_t bfloat16_from_float(float value) {
  const uint32_t bits = bits_from_float(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float float_from_bfloat16(uint16_t bits) { return float_from_bits(static_cast<uint32_t>(bits) << 16); }

inline uint16_t float16_from_float(float value) {
  const uint32_t sign = (bits_from_float(value) >> 16) & 0x8000;
  const uint32_t bits = bits_from_float(value) & 0x7fffffff;
  if (bits > 0x7f800000) return 0x7fff;
  if (bits >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // rounds to 65536 or more
  if (bits < 0x38800000) {
    // Below 2^-14 the result is a multiple of 2^-24: adding 0.5 puts that bit last, and the adder rounds.
    const float shifted = float_from_bits(bits) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_from_float(shifted) - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | ((bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13));
}

inline float float_from_float16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return float_from_bits(magnitude == 0x7c00 ? sign | 0x7f800000 : 0x7fffffff);
  // 2^112 moves the exponent from bias 15 to bias 127 and makes a subnormal half a normal float.
  const float scaled = float_from_bits(magnitude << 13) * float_from_bits(0x77800000);
  return float_from_bits(sign | bits_from_float(scaled));
}

}  // namespace cuflash::emulator
