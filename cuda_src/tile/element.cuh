// What the tensor cores take of each element type: the depth of one product and the registers of its operands.
#pragma once
#include "ptx/element_types.cuh"
#include "ptx/math.cuh"
#include "ptx/mma_sync.cuh"

namespace cuflash::tile {

// What one thread holds of an operand: 16 rows (of A, or columns of B: two 8-column halves) by kDepth elements.
template <class Element>
struct Fragment {
  uint32_t words[4];
};

// Which float32 values an operand may hold. Finite ones are split in half the time; an infinite one would come out NaN,
// and so would one above kLargestFinite.
enum class Values { kFinite, kAny };
inline constexpr float kLargestFinite = 0x1p114f;

// A fragment as the tensor cores take it.
template <class Element>
struct Operand {
  static constexpr int kDepth = 16;
  uint32_t words[4];

  template <Values>
  CUFLASH_DEVICE static Operand from(const Fragment<Element>& fragment) {
    const auto& words = fragment.words;
    return {{words[0], words[1], words[2], words[3]}};
  }
};

// float32 goes through the tensor cores as a sum of two tf32 numbers, which together hold its 24 bits but for the last.
template <>
struct Operand<float> {
  static constexpr int kDepth = 8;
  uint32_t big[4], small[4];

  // The nearest tf32: the sum's last bit is the 13th of the value. Multiplications run at the full rate of the machine,
  // integer arithmetic at half of it, and the conversion instruction took a third of a float32 kernel's time.
  CUFLASH_DEVICE static float big_of(float value) {
    return ptx::fma(value, -8192.0f, ptx::fma(value, 8192.0f, value));
  }

  // The number that stands for a finite value in products: the tensor core reads the upper 19 bits of the rest.
  CUFLASH_DEVICE static float nearest(float value) {
    const float big = big_of(value);
    return big + ptx::bit_cast<float>(ptx::bit_cast<uint32_t>(value - big) & 0xffffe000u);
  }

  // The rest has 12 bits at most, of which the tensor core keeps 11: 24 in all. An infinite element stands in the small
  // part alone, which meets one part of the other operand only: meeting both would give inf - inf or 0 * inf, where the
  // product itself is infinite. So do finite ones above the largest tf32.
  template <Values kValues>
  CUFLASH_DEVICE static Operand from(const Fragment<float>& fragment) {
    constexpr float kTooBig = __builtin_bit_cast(float, 0x7f7ff000u);
    Operand operand;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float value = ptx::bit_cast<float>(fragment.words[i]);
      if constexpr (kValues == Values::kFinite) {
        operand.big[i] = ptx::bit_cast<uint32_t>(big_of(value));
      } else {  // in integers, which do not overflow; a carry into the exponent is what rounding wants
        operand.big[i] = ptx::abs(value) >= kTooBig ? 0u : (fragment.words[i] + 0x1000u) & 0xffffe000u;
      }
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
template <class Element>
CUFLASH_DEVICE void multiply_add(float (&c)[4], const Operand<Element>& a, const Operand<Element>& b, int half) {
  ptx::mma_m16n8k16<Element>(c, a.words, b.words[2 * half], b.words[2 * half + 1]);
}
CUFLASH_DEVICE void multiply_add(float (&c)[4], const Operand<float>& a, const Operand<float>& b, int half) {
  float fresh[4] = {};
  ptx::mma_m16n8k8_tf32(fresh, a.small, b.big[2 * half], b.big[2 * half + 1]);
  ptx::mma_m16n8k8_tf32(fresh, a.big, b.small[2 * half], b.small[2 * half + 1]);
  ptx::mma_m16n8k8_tf32(fresh, a.big, b.big[2 * half], b.big[2 * half + 1]);
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i] += fresh[i];
}

// Both halves of kSteps float32 products. Three products of tf32 halves give float32 accuracy: what is dropped, small *
// small, is 2^-24 of the product. The small ones come first, while the sum is small too. A long chain gives these steps
// a sum of their own, which a float32 addition, to nearest, brings home.
template <Chain kChain, int kSteps>
CUFLASH_DEVICE void multiply_add(float (&left)[4], float (&right)[4], const Operand<float> (&a)[kSteps],
                                 const Operand<float> (&b)[kSteps]) {
  float fresh[2][4] = {};
  float(&left_sum)[4] = kChain == Chain::kLong ? fresh[0] : left;
  float(&right_sum)[4] = kChain == Chain::kLong ? fresh[1] : right;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    ptx::mma_m16n8k8_tf32(left_sum, a[i].small, b[i].big[0], b[i].big[1]);
    ptx::mma_m16n8k8_tf32(right_sum, a[i].small, b[i].big[2], b[i].big[3]);
    ptx::mma_m16n8k8_tf32(left_sum, a[i].big, b[i].small[0], b[i].small[1]);
    ptx::mma_m16n8k8_tf32(right_sum, a[i].big, b[i].small[2], b[i].small[3]);
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    ptx::mma_m16n8k8_tf32(left_sum, a[i].big, b[i].big[0], b[i].big[1]);
    ptx::mma_m16n8k8_tf32(right_sum, a[i].big, b[i].big[2], b[i].big[3]);
  }
  if constexpr (kChain == Chain::kLong) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      left[i] += fresh[0][i];
      right[i] += fresh[1][i];
    }
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

// Looks through words for an element that is NaN or infinite, or as a float32 too large for Values::kFinite.
template <class Element>
struct NonfiniteSearch {
  uint32_t signs = 0;
  CUFLASH_DEVICE void take(uint32_t word) { signs |= nonfinite_signs<Element>(word); }
  CUFLASH_DEVICE bool has_found() const { return (signs & kSignMask<Element>) != 0; }
};
template <>
struct NonfiniteSearch<float> {
  float largest = 0.0f;
  CUFLASH_DEVICE void take(uint32_t word) { largest = ptx::max_nan(largest, ptx::abs(ptx::bit_cast<float>(word))); }
  CUFLASH_DEVICE bool has_found() const { return !(largest <= kLargestFinite); }
};

}  // namespace cuflash::tile
