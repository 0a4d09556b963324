// Products of tiles on one warp's tensor cores: registers and shared memory in, registers out.
#pragma once
#include "tile/fragment.cuh"

namespace cuflash::tile {

// Steps of a float32 product of scores that the compiler sees at once.
inline constexpr int kScoreUnroll = 4;

// float32 steps whose products share a sum of their own: the more, the fewer additions, and the more registers. Four
// steps took 3 to 10 per cent less time than two, and rounding toward zero does not show in them.
inline constexpr int kMostTogether = 4;
CUFLASH_DEVICE constexpr int steps_together(int steps, int most) {
  int together = most;
  while (steps % together != 0) together /= 2;
  return together;
}

// A product of tiles, each operand fetched when it is needed.
template <class Element, int kSteps, Values kValues, Chain kChain, int kUnroll, int kMost, class C, class A, class B>
CUFLASH_DEVICE void gemm_in_order(C& c, A& a, B& b) {
  using Operand = tile::Operand<Element>;
  constexpr int kTogether = steps_together(kSteps, kMost);
#pragma unroll kUnroll > kTogether ? kUnroll / kTogether : 1
  for (int first = 0; first < kSteps; first += kTogether) {
    Operand a_frag[C::kRowTiles][kTogether];
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) a_frag[m][i] = Operand::template from<kValues>(a(m, first + i));
    }
#pragma unroll
    for (int pair = 0; pair < C::kColTiles / 2; ++pair) {
      Operand b_frag[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) b_frag[i] = Operand::template from<kValues>(b(pair, first + i));
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        multiply_add<kChain>(c.values[m][2 * pair], c.values[m][2 * pair + 1], a_frag[m], b_frag);
      }
    }
  }
}

// The same for 16-bit elements, ahead of time: each b is fetched before the products of the one before it are issued,
// and the a's of a step before the products of the step before, so that loads (and, for probabilities, exponentials)
// run in their shadow.
template <class Element, int kSteps, class C, class A, class B>
CUFLASH_DEVICE void gemm_ahead(C& c, A& a, B& b) {
  constexpr int kPairs = C::kColTiles / 2;
  const auto operand = [](const Fragment<Element>& f) { return Operand<Element>::template from<Values::kAny>(f); };
  Operand<Element> a_frag[2][C::kRowTiles], b_frag[2];
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) a_frag[0][m] = operand(a(m, 0));
  b_frag[0] = operand(b(0, 0));
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const int count = step * kPairs + pair;
      const bool is_last = pair + 1 == kPairs;
      if (count + 1 < kSteps * kPairs) {
        b_frag[(count + 1) % 2] = operand(b(is_last ? 0 : pair + 1, is_last ? step + 1 : step));
      }
      if (pair == 0 && step + 1 < kSteps) {
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) a_frag[(step + 1) % 2][m] = operand(a(m, step + 1));
      }
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        multiply_add(c.values[m][2 * pair], a_frag[step % 2][m], b_frag[count % 2], 0);
        multiply_add(c.values[m][2 * pair + 1], a_frag[step % 2][m], b_frag[count % 2], 1);
      }
    }
  }
}

// c [16 m, 8 n] += a [16 m, depth] * b [depth, 8 n], depth = kSteps * Operand::kDepth. a(row_tile, step) and
// b(col_pair, step) return fragments: readers of shared memory, or functions that make them from registers. float32's
// operands take twice the registers, and its six products a pair cast a shadow long enough without fetching ahead;
// where a comes from shared memory, kUnroll below kSteps keeps its steps a loop, of which the compiler cannot fetch
// too much.
template <class Element, int kSteps, Values kValues = Values::kAny, Chain kChain = Chain::kLong, int kUnroll = kSteps,
          int kMost = kMostTogether, class C, class A, class B>
CUFLASH_DEVICE void gemm(C& c, A&& a, B&& b) {
  static_assert(C::kColTiles % 2 == 0, "columns come in pairs of 8");
  if constexpr (sizeof(Element) == 4) {
    gemm_in_order<Element, kSteps, kValues, kChain, kUnroll, kMost>(c, a, b);
  } else {
    gemm_ahead<Element, kSteps>(c, a, b);
  }
}

}  // namespace cuflash::tile
