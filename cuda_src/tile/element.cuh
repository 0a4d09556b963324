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

// float32 goes through the tensor cores as a sum of two tf32 numbers, which together hold its 24 bits but for the last.
template <>
struct Operand<float> {
  static constexpr int kDepth = 8;
  uint32_t big[4], small[4];

  // To nearest by integer arithmetic, at the full rate of the machine; the conversion instruction runs at a fraction of
  // it, and took a third of a float32 kernel's time. A carry into the exponent is what rounding wants.
  CUFLASH_DEVICE static uint32_t big_of(uint32_t word) { return (word + 0x1000u) & 0xffffe000u; }

  // The number that stands for a finite value in products: the tensor core reads the upper 19 bits of the rest.
  CUFLASH_DEVICE static float nearest(float value) {
    const float big = ptx::bit_cast<float>(big_of(ptx::bit_cast<uint32_t>(value)));
    return big + ptx::bit_cast<float>(ptx::bit_cast<uint32_t>(value - big) & 0xffffe000u);
  }

  // The rest has 12 bits at most, of which the tensor core keeps 11: 24 in all. An infinite element stands in the small
  // part alone, which meets one part of the other operand only: meeting both would give inf - inf or 0 * inf, where the
  // product itself is infinite. So do finite ones above the largest tf32.
  CUFLASH_DEVICE static Operand from_words(const uint32_t (&words)[4]) {
    constexpr float kTooBig = __builtin_bit_cast(float, 0x7f7ff000u);
    Operand operand;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float value = ptx::bit_cast<float>(words[i]);
      operand.big[i] = ptx::abs(value) >= kTooBig ? 0u : big_of(words[i]);
      operand.small[i] = ptx::bit_cast<uint32_t>(value - ptx::bit_cast<float>(operand.big[i]));
    }
    return operand;
  }
};

// How many products meet in one accumulator. The tensor core rounds its sums toward zero: over the whole of a sequence
// (long) that drifts by some hundred units of float32, over one tile (short) by a few, which may be too many where an
// exponential follows. It matters to float32 alone.
enum class Chain { kShort, kLong };

// c [16, 8] += a [16, kDepth] * b [kDepth, 8], where b is one half of a 16-column operand.
template <Chain kChain = Chain::kLong, class Element>
CUFLASH_DEVICE void multiply_add(float (&c)[4], const Operand<Element>& a, const Operand<Element>& b, int half) {
  ptx::mma_m16n8k16<Element>(c, a.words, b.words[2 * half], b.words[2 * half + 1]);
}

// Three products of tf32 halves give float32 accuracy: what is dropped, small * small, is 2^-24 of the product. The
// small ones come first, while the sum is small too. A long chain gives each step a sum of its own, which a float32
// addition, to nearest, brings home.
template <Chain kChain = Chain::kLong>
CUFLASH_DEVICE void multiply_add(float (&c)[4], const Operand<float>& a, const Operand<float>& b, int half) {
  float fresh[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  float(&sum)[4] = kChain == Chain::kLong ? fresh : c;
  ptx::mma_m16n8k8_tf32(sum, a.small, b.big[2 * half], b.big[2 * half + 1]);
  ptx::mma_m16n8k8_tf32(sum, a.big, b.small[2 * half], b.small[2 * half + 1]);
  ptx::mma_m16n8k8_tf32(sum, a.big, b.big[2 * half], b.big[2 * half + 1]);
  if constexpr (kChain == Chain::kLong) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] += fresh[i];
  }
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
