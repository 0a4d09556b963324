// The softmax of the sm_90 forward kernel, on the fragment of one block of scores.
//
// P = 2^(unit * score - base), and the result does not depend on the base as long as nothing overflows or vanishes.
// Three ways to choose it:
//   plain       the running maximum: found before the exponentials of each block, outputs rescaled after each block;
//   optimistic  the maximum of the blocks before: the maximum of a block is found beside its exponentials, and the base
//               follows only when it was outgrown by more than kFollow;
//   fixed       the maximum of the boundary blocks, which come first, and under a mask of one block more, since it may
//               have left a row a single key; afterwards nobody looks for a maximum. A row whose sum over a block is
//               large moves its base to the maximum of the block, before its P is rounded to 16 bits.
// The base is never above the true maximum, so nothing that matters vanishes; what overflows all the same (a jump
// beyond the exponent range inside one block) shows as an output that is not finite, and the tile is redone in the
// plain form.
#pragma once
#include "attention/softmax.cuh"
#include "kernels/forward_sm90_tiles.cuh"
#include "tile/arithmetic.cuh"
#include "tile/warpgroup_fragment.cuh"

namespace cuflash {

// Optimistic: log2; a block that outgrew the base by more is redone. bfloat16 has the exponent range of float, in
// float16 P must stay below 65504.
template <class Element>
inline constexpr float kJump = 64.0f;
template <>
inline constexpr float kJump<float16> = 15.0f;
inline constexpr float kFollow = 8.0f;       // log2; the optimistic base follows after this growth
inline constexpr float kLostProb = 1.0e30f;  // a P beyond it and the factor that brings it to 1 may leave float's range

// Fixed: a thread's part of a block's row sum beyond which the row moves its base: the number of the thread's keys, so
// that a row moves only if it has a P above 1, however flat its scores. A P of 1 is exact, any other is off by up to
// half a digit, and a row with one key that outweighs all others gives that key's value as it is only if that key has
// P = 1. Without a limit, inputs with outliers had 1.2 to 1.4 times the error of a running maximum; with 32 (128 keys)
// they have 1.02 to 1.04 times, with 16 (64 keys) 1.01 to 1.03.
template <int kBlockK>
inline constexpr float kMoveLimit = kBlockK / 4;

// The two rows of a thread. The sums are the thread's own part of the row until the tile is finished.
struct RowStats {
  float base[2] = {-ptx::kInfinity, -ptx::kInfinity};  // log2 units
  float sum[2] = {0.0f, 0.0f};
  float pending[2] = {1.0f, 1.0f};  // optimistic: factor that the output still waits for
  bool is_lost = false;             // the tile must be redone
};

// A row that has seen no key has no base; 0 stands in, since all its scores are -inf.
CUFLASH_DEVICE float usable_base(float base) { return base == -ptx::kInfinity ? 0.0f : base; }

// Moves the base up to the maximum of a block and returns what that does to earlier sums and outputs.
template <int kCount>
CUFLASH_DEVICE void raise_base(const float (&scores)[kCount], float unit, RowStats& rows, float (&rescale)[2]) {
  float largest[2];
  tile::row_max(scores, largest);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float base = ptx::max(rows.base[i], largest[i] * unit);
    rescale[i] = ptx::ex2(rows.base[i] - usable_base(base));
    rows.base[i] = base;
    rows.sum[i] *= rescale[i];
  }
}

// scores become P; block_sum is the thread's part of the row sums and, if asked for, largest its largest scores.
template <bool kFindLargest, int kCount>
CUFLASH_DEVICE void exponentiate(float (&scores)[kCount], float unit, const RowStats& rows, float (&block_sum)[2],
                                 float (&largest)[2]) {
  const float base[2] = {usable_base(rows.base[0]), usable_base(rows.base[1])};
  block_sum[0] = block_sum[1] = 0.0f;
  largest[0] = largest[1] = -ptx::kInfinity;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const int row = tile::row_of(i);
    if constexpr (kFindLargest) largest[row] = ptx::max(ptx::max(largest[row], scores[i]), scores[i + 1]);
    scores[i] = ptx::ex2(ptx::fma(scores[i], unit, -base[row]));
    scores[i + 1] = ptx::ex2(ptx::fma(scores[i + 1], unit, -base[row]));
    block_sum[row] += scores[i] + scores[i + 1];
  }
}

// Optimistic: after a block, follow its maximum if it grew far. The output follows once the product in flight has
// landed.
template <class Element>
CUFLASH_DEVICE void follow_base(const float (&largest)[2], float unit, RowStats& rows) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float wanted = tile::quad_max(largest[i]) * unit, growth = wanted - rows.base[i];
    const bool follows = growth > kFollow;
    rows.is_lost |= growth > kJump<Element>;
    rows.pending[i] = follows ? ptx::ex2(-growth) : 1.0f;
    rows.base[i] = follows ? wanted : rows.base[i];
    rows.sum[i] *= rows.pending[i];
  }
}

// Fixed: rare. Moves the base of rows whose sum passed the limit to their maximum; P of the block and the outputs must
// follow by the returned factors. The factor is taken from the base that was reached, so a base of millions, whose
// digits are coarse, does no harm.
template <int kBlockK, int kCount>
CUFLASH_DEVICE void move_base(const float (&probs)[kCount], RowStats& rows, float (&block_sum)[2],
                              float (&factor)[2]) {
  float largest[2];
  tile::row_max(probs, largest);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    rows.is_lost |= largest[i] > kLostProb;
    // The row's own affair, whatever its neighbours hold.
    const bool moves = tile::quad_max(block_sum[i]) > kMoveLimit<kBlockK>;
    const float moved = moves ? rows.base[i] + ptx::lg2(largest[i]) : rows.base[i];
    factor[i] = ptx::ex2(rows.base[i] - moved);
    rows.base[i] = moved;
    rows.sum[i] *= factor[i];
    block_sum[i] *= factor[i];
  }
}

}  // namespace cuflash
