// Products of tiles on one warp's tensor cores: registers and shared memory in, registers out.
#pragma once
#include "tile/fragment.cuh"

namespace cuflash::tile {

// Steps of a float32 product of scores that the compiler sees at once.
inline constexpr int kScoreUnroll = 2;

// A product of tiles, each operand fetched when it is needed.
template <class Element, int kSteps, Chain kChain, int kUnroll, class C, class A, class B>
CUFLASH_DEVICE void gemm_in_order(C& c, A& a, B& b) {
#pragma unroll kUnroll
  for (int step = 0; step < kSteps; ++step) {
    Operand<Element> a_frag[C::kRowTiles];
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) a_frag[m] = a(m, step);
#pragma unroll
    for (int pair = 0; pair < C::kColTiles / 2; ++pair) {
      const Operand<Element> b_frag = b(pair, step);
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        multiply_add<kChain>(c.values[m][2 * pair], a_frag[m], b_frag, 0);
        multiply_add<kChain>(c.values[m][2 * pair + 1], a_frag[m], b_frag, 1);
      }
    }
  }
}

// The same, ahead of time: each b is fetched before the products of the one before it are issued, and the a's of a step
// before the products of the step before, so that loads (and, for probabilities, exponentials) run in their shadow.
template <class Element, int kSteps, Chain kChain, class C, class A, class B>
CUFLASH_DEVICE void gemm_ahead(C& c, A& a, B& b) {
  constexpr int kPairs = C::kColTiles / 2;
  Operand<Element> a_frag[2][C::kRowTiles], b_frag[2];
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) a_frag[0][m] = a(m, 0);
  b_frag[0] = b(0, 0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const int count = step * kPairs + pair;
      const bool is_last = pair + 1 == kPairs;
      if (count + 1 < kSteps * kPairs) b_frag[(count + 1) % 2] = b(is_last ? 0 : pair + 1, is_last ? step + 1 : step);
      if (pair == 0 && step + 1 < kSteps) {
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) a_frag[(step + 1) % 2][m] = a(m, step + 1);
      }
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        multiply_add<kChain>(c.values[m][2 * pair], a_frag[step % 2][m], b_frag[count % 2], 0);
        multiply_add<kChain>(c.values[m][2 * pair + 1], a_frag[step % 2][m], b_frag[count % 2], 1);
      }
    }
  }
}

// c [16 m, 8 n] += a [16 m, depth] * b [depth, 8 n], depth = kSteps * Operand::kDepth. a(row_tile, step) and
// b(col_pair, step) return operands: readers of shared memory, or functions that make them from registers. float32's
// operands take twice the registers, and its six products a pair cast a shadow long enough without fetching ahead;
// where a comes from shared memory, kUnroll below kSteps keeps its steps a loop, of which the compiler cannot fetch
// too much.
template <class Element, int kSteps, Chain kChain = Chain::kLong, int kUnroll = kSteps, class C, class A, class B>
CUFLASH_DEVICE void gemm(C& c, A&& a, B&& b) {
  static_assert(C::kColTiles % 2 == 0, "columns come in pairs of 8");
  if constexpr (sizeof(Element) == 4) {
    gemm_in_order<Element, kSteps, kChain, kUnroll>(c, a, b);
  } else {
    gemm_ahead<Element, kSteps, kChain>(c, a, b);
  }
}

}  // namespace cuflash::tile
