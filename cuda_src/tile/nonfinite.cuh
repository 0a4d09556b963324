// What elements that are not finite add to a product whose left operand has zeros that stand for "does not see".
#pragma once
#include "tile/finite.cuh"
#include "tile/gemm.cuh"

namespace cuflash::tile {

// Powers of two stand for infinities and NaN in a product that counts them: sums tell all three apart and are exact.
inline constexpr int kPlusInfinity = 1, kMinusInfinity = 1 << 8, kNotANumber = 1 << 15;
inline constexpr int kMostCounted = kMinusInfinity - 1;

// Zero for a finite element.
CUFLASH_DEVICE float nonfinite_count(float value) {
  const int infinity = value > 0.0f ? kPlusInfinity : kMinusInfinity;
  return is_finite(value) ? 0.0f : static_cast<float>(value != value ? kNotANumber : infinity);
}

// A fragment of 32-bit words from what make(i, j) gives for element j of word i; float32 has one element a word.
template <class Element, class Make>
CUFLASH_DEVICE Fragment<Element> fragment_of(Make make) {
  Fragment<Element> fragment;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(Element) == 4) fragment.words[i] = ptx::bit_cast<uint32_t>(make(i, 0));
    else fragment.words[i] = ptx::pack2<Element>(make(i, 0), make(i, 1));
  }
  return fragment;
}

CUFLASH_DEVICE float with_nonfinite(float sum, int count) {
  if (count % kMinusInfinity != 0) sum += ptx::kInfinity;
  if (count % kNotANumber / kMinusInfinity != 0) sum -= ptx::kInfinity;
  return count / kNotANumber != 0 ? ptx::kInfinity - ptx::kInfinity : sum;
}

template <class Element>
CUFLASH_DEVICE void multiply_exact(float (&c)[4], const Fragment<Element>& a, const Fragment<Element>& b, int half) {
  if constexpr (sizeof(Element) == 4) {
    ptx::mma_m16n8k8_tf32(c, a.words, b.words[2 * half], b.words[2 * half + 1]);
  } else {
    ptx::mma_m16n8k16<Element>(c, a.words, b.words[2 * half], b.words[2 * half + 1]);
  }
}

// c [16 m, 8 n] += a * b restricted to the elements of b that are not finite, for a that is positive where sees(row,
// depth) and zero elsewhere: infinite or NaN in rows that see such an element, unchanged in the others, which a product
// would reach as 0 * NaN. float32 depths come in paired order. Loops are rolled to keep the code small.
template <class Element, int kSteps, class C, class B, class Sees>
CUFLASH_DEVICE void add_nonfinite(C& c, B&& b, Sees&& sees) {
  constexpr int kDepth = Operand<Element>::kDepth;
  static_assert(kSteps * kDepth <= kMostCounted, "counts do not meet");
  const int row = ptx::lane_index() / 4, t = ptx::lane_index() % 4;
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll 1
    for (int pair = 0; pair < C::kColTiles / 2; ++pair) {
      float counts[2][4] = {};
#pragma unroll 1
      for (int step = 0; step < kSteps; ++step) {
        const Fragment<Element> seen = fragment_of<Element>([&](int i, int j) {
          const int depth = sizeof(Element) == 4 ? 2 * t + i / 2 : 2 * t + i / 2 * 8 + j;
          return sees(m * 16 + row + i % 2 * 8, step * kDepth + depth) ? 1.0f : 0.0f;
        });
        const Fragment<Element> right = b(pair, step);
        const Fragment<Element> counted = fragment_of<Element>([&](int i, int j) {
          float values[2];
          if constexpr (sizeof(Element) == 4) values[0] = ptx::bit_cast<float>(right.words[i]);
          else ptx::unpack2<Element>(right.words[i], values[0], values[1]);
          return nonfinite_count(values[j]);
        });
        multiply_exact(counts[0], seen, counted, 0);
        multiply_exact(counts[1], seen, counted, 1);
      }
      // The first two column tiles, and then the others move up: a register has no index that a loop could count.
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float first[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) first[i] = with_nonfinite(c.values[m][half][i], static_cast<int>(counts[half][i]));
#pragma unroll
        for (int n = half; n + 2 < C::kColTiles; n += 2) {
#pragma unroll
          for (int i = 0; i < 4; ++i) c.values[m][n][i] = c.values[m][n + 2][i];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) c.values[m][C::kColTiles - 2 + half][i] = first[i];
      }
    }
  }
}

}  // namespace cuflash::tile
