// Names of the plain types that primitives take and return; the same file serves the GPU and the emulator.
#pragma once

namespace cuflash {

// NVRTC has no <stdint.h>. The 64-bit names are spelt so that they are the types of the host's header on every
// platform (long on Linux, long long on Windows): both declarations may then stand side by side.
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using size_t = decltype(sizeof(0));
using ptrdiff_t = decltype(static_cast<char*>(nullptr) - static_cast<char*>(nullptr));
using uint64_t = size_t;
using int64_t = ptrdiff_t;
static_assert(sizeof(int64_t) == 8 && sizeof(uint64_t) == 8);

// 16-bit floating point as tagged bits.
struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};

struct alignas(8) u32x2 {
  uint32_t x, y;
};
struct alignas(16) u32x4 {
  uint32_t x, y, z, w;
};
struct alignas(8) f32x2 {
  float x, y;
};
struct alignas(16) f32x4 {
  float x, y, z, w;
};

namespace ptx {

using cuflash::bfloat16;
using cuflash::f32x2;
using cuflash::f32x4;
using cuflash::float16;
using cuflash::u32x2;
using cuflash::u32x4;

template <class T>
inline constexpr bool is_bfloat16 = false;
template <>
inline constexpr bool is_bfloat16<bfloat16> = true;

// Describes a tensor and a box of it, encoded on the host; lives in the parameters of the kernel.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

}  // namespace ptx
}  // namespace cuflash
