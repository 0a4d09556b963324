// What the tensor cores take of each element type: the depth of one product and the registers of its operands.
#pragma once
#include "ptx/element_types.cuh"
#include "ptx/math.cuh"
#include "ptx/mma_sync.cuh"

namespace cuflash::tile {

// A 16-bit operand of one product: 16 rows (of A, or columns of B: two 8-column halves) by kDepth elements.
template <class Element>
struct Operand {
  static constexpr int kDepth = 16;
  uint32_t words[4];

  CUFLASH_DEVICE static Operand from_words(const uint32_t (&words)[4]) {
    return {{words[0], words[1], words[2], words[3]}};
  }
};

// float32 goes through the tensor cores as a sum of two tf32 numbers, which together hold 22 of its 24 bits.
template <>
struct Operand<float> {
  static constexpr int kDepth = 8;
  uint32_t big[4], small[4];

  // The number that stands for a finite value in products.
  CUFLASH_DEVICE static float nearest(float value) {
    const float big = ptx::bit_cast<float>(ptx::to_tf32(value));
    return big + ptx::bit_cast<float>(ptx::to_tf32(value - big));
  }

  CUFLASH_DEVICE static Operand from_words(const uint32_t (&words)[4]) {
    Operand operand;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float value = ptx::bit_cast<float>(words[i]);
      // An infinite element stands in the small part alone, which meets one part of the other operand only: meeting
      // both would give inf - inf or 0 * inf, where the product itself is infinite.
      const bool is_infinite = ptx::abs(value) == ptx::kInfinity;
      operand.big[i] = is_infinite ? 0u : ptx::to_tf32(value);
      operand.small[i] = ptx::to_tf32(value - ptx::bit_cast<float>(operand.big[i]));
    }
    return operand;
  }
};

// c [16, 8] += a [16, kDepth] * b [kDepth, 8], where b is one half of a 16-column operand.
template <class Element>
CUFLASH_DEVICE void multiply_add(float (&c)[4], const Operand<Element>& a, const Operand<Element>& b, int half) {
  ptx::mma_m16n8k16<Element>(c, a.words, b.words[2 * half], b.words[2 * half + 1]);
}

// Three products of tf32 halves give float32 accuracy: what is dropped, small * small, is 2^-22 of the product. The
// small ones come first, while the sum is small too.
CUFLASH_DEVICE void multiply_add(float (&c)[4], const Operand<float>& a, const Operand<float>& b, int half) {
  ptx::mma_m16n8k8_tf32(c, a.small, b.big[2 * half], b.big[2 * half + 1]);
  ptx::mma_m16n8k8_tf32(c, a.big, b.small[2 * half], b.small[2 * half + 1]);
  ptx::mma_m16n8k8_tf32(c, a.big, b.big[2 * half], b.big[2 * half + 1]);
}

// Bits that are all ones in an infinite or NaN element and in no other, for each element of a 32-bit word, and what
// carries out of them into the sign bit.
template <class Element>
inline constexpr uint32_t kExponentMask = 0x7c007c00u;
template <>
inline constexpr uint32_t kExponentMask<bfloat16> = 0x7f807f80u;
template <>
inline constexpr uint32_t kExponentMask<float> = 0x7f800000u;
template <class Element>
inline constexpr uint32_t kExponentUnit = 0x04000400u;
template <>
inline constexpr uint32_t kExponentUnit<bfloat16> = 0x00800080u;
template <>
inline constexpr uint32_t kExponentUnit<float> = 0x00800000u;
template <class Element>
inline constexpr uint32_t kSignMask = sizeof(Element) == 4 ? 0x80000000u : 0x80008000u;

// A word whose kSignMask bits tell which of the elements in `word` are not finite; the other bits are meaningless.
template <class Element>
CUFLASH_DEVICE uint32_t nonfinite_signs(uint32_t word) {
  return (word & kExponentMask<Element>) + kExponentUnit<Element>;
}

}  // namespace cuflash::tile
