// Host twin: conversions between float and the narrow types.
#pragma once
#include "emulator/runtime/half.h"
#include "ptx/platform.cuh"

namespace cuflash::ptx {

CUFLASH_DEVICE float to_float(float value) { return value; }
CUFLASH_DEVICE float to_float(bfloat16 value) { return emulator::float_from_bfloat16(value.bits); }
CUFLASH_DEVICE float to_float(float16 value) { return emulator::float_from_float16(value.bits); }

template <class T>
CUFLASH_DEVICE T from_float(float value) {
  if constexpr (is_bfloat16<T>) return {emulator::bfloat16_from_float(value)};
  else return {emulator::float16_from_float(value)};
}
template <>
CUFLASH_DEVICE float from_float<float>(float value) {
  return value;
}

template <class T>
CUFLASH_DEVICE uint32_t pack2(float lo, float hi) {
  return from_float<T>(lo).bits | static_cast<uint32_t>(from_float<T>(hi).bits) << 16;
}

template <class T>
CUFLASH_DEVICE void unpack2(uint32_t packed, float& lo, float& hi) {
  lo = to_float(T{static_cast<uint16_t>(packed)});
  hi = to_float(T{static_cast<uint16_t>(packed >> 16)});
}

// Round to nearest, ties away from zero, to 10 mantissa bits.
CUFLASH_DEVICE uint32_t to_tf32(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7f800000) == 0x7f800000) return bits & 0xffffe000u;  // a NaN is cut, as seen on an H200
  return (bits + 0x1000) & 0xffffe000u;
}

}  // namespace cuflash::ptx
