// A product whose left operand has zeros that stand for "does not see": exact when the right one holds NaN or infinity.
#pragma once
#include "ptx/barrier.cuh"
#include "tile/gemm.cuh"

namespace cuflash::tile {

// The part of `b` that one row sees; the rest becomes zero. sees(depth) tells for a depth inside this step.
template <class Element, class Sees>
CUFLASH_DEVICE Operand<Element> visible_part(const Operand<Element>& b, Sees sees) {
  const int t = ptx::lane_index() % 4;
  Operand<Element> part;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int depth = 2 * t + i % 2 * 8;
    const uint32_t low = sees(depth) ? 0x0000ffffu : 0u;
    const uint32_t high = sees(depth + 1) ? 0xffff0000u : 0u;
    part.words[i] = b.words[i] & (low | high);
  }
  return part;
}
template <class Sees>
CUFLASH_DEVICE Operand<float> visible_part(const Operand<float>& b, Sees sees) {
  const int t = ptx::lane_index() % 4;
  Operand<float> part;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool seen = sees(2 * t + i % 2);  // paired order
    part.big[i] = seen ? b.big[i] : 0u;
    part.small[i] = seen ? b.small[i] : 0u;
  }
  return part;
}

// c += a * b where an element of b that a row does not see never meets that row, not even as 0 * NaN. As gemm, with
// sees(row, depth) in positions of the tiles and float32 depths in paired order. Every row of a 16-row tile gets a
// product of its own, of which it alone is kept: 16 times the work, for the rare tile that holds such an element.
// Loops are rolled to keep the code small; `a` is called with step 0 only and next() drops its first step.
template <class Element, int kSteps, class C, class A, class B, class Sees, class Next>
CUFLASH_DEVICE void visible_gemm(C& c, A&& a, B&& b, Sees&& sees, Next&& next) {
  const int lane_row = ptx::lane_index() / 4;
#pragma unroll 1
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      const Operand<Element> a_frag = a(m);
#pragma unroll 1
      for (int row = 0; row < 16; ++row) {
#pragma unroll
        for (int pair = 0; pair < C::kColTiles / 2; ++pair) {
          ptx::sync_warp();  // keeps the compiler from fetching all pairs at once: registers are short here
          const Operand<Element> b_frag = visible_part(
              b(pair, step), [&](int depth) { return sees(m * 16 + row, step * Operand<Element>::kDepth + depth); });
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float(&sum)[4] = c.values[m][2 * pair + half];
            float raised[4] = {sum[0], sum[1], sum[2], sum[3]};
            multiply_add(raised, a_frag, b_frag, half);
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] = lane_row + i / 2 * 8 == row ? raised[i] : sum[i];
          }
        }
      }
    }
    next();
  }
}

}  // namespace cuflash::tile
