// Online softmax in log2 units: probabilities relative to a base a row that moves only when it must.
#pragma once
#include "tile/arithmetic.cuh"

namespace cuflash {

// Softmax does not depend on the base as long as nothing overflows, so a base need not be the running maximum:
//   - in a block whose maximum is looked up, the base may stay this far (log2 units) below it, and the accumulated
//     output needs no rescale;
inline constexpr float kBaseSlack = 1.0f;
//   - in other blocks the maximum is not looked up at all. A thread whose part of a block's row sum passes kSumLimit
//     tells that the base is too low, and the base follows.
// Both are far below what 16 bits could hold: a probability of 1 is exact, any other is off by up to half a digit, and
// a row with one key that outweighs all others gives that key's value as it is only if that key has probability 1.
// Random normal scores hardly ever reach a limit of 32, but a mask can leave a row one key in its first block, a base
// of nothing: with 32, causal rows moved so often that it cost 3 to 7% of the time.
template <class Mask>
inline constexpr float kSumLimit = Mask::kUniform ? 32.0f : 128.0f;

// The base of a row that has seen no key: every score that is not -inf stands above it, so it acts as -inf would, but
// differences of bases and scores stay numbers where -inf - -inf is none.
inline constexpr float kNoBase = -3.4028234663852886e38f;

// The probability relative to the base, in one fused multiply-add and one exponential; a score of -inf gives exactly 0.
CUFLASH_DEVICE float probability(float score, float unit, float base) {
  return tile::exp2(tile::fma(score, unit, -base));
}

// Beyond this size (log2 units) the rounding of a base moves probabilities by powers of two, in the end out of float's
// range. The scaled score is rounded like the base there, as an unfused computation would: the largest gives exactly 1.
inline constexpr float kCoarseBase = 16777216.0f;  // 2^24

// 1 / sum for the output; a row without keys has sum 0 and output 0.
CUFLASH_DEVICE float normalizer(float sum) { return sum == 0.0f ? 0.0f : tile::reciprocal(sum); }

// value / sum to the last bit of float32 or nearly, with inverse = normalizer(sum): a step of Newton's method mends the
// rounding of the inverse. An infinite value stays as it is; its remainder would be inf - inf.
CUFLASH_DEVICE float quotient(float value, float sum, float inverse) {
  const float rough = value * inverse;
  return tile::magnitude(rough) < kInfinity ? tile::fma(tile::fma(-rough, sum, value), inverse, rough) : rough;
}

// Natural logarithm of the row sum; -inf for a row without keys. Gradients recompute probabilities from it, so it is
// rounded once: ln 2 in two parts, the large product last.
CUFLASH_DEVICE float log_sum_exp(float base, float sum) {
  constexpr float kLn2Low = static_cast<float>(0.693147180559945309417 - static_cast<double>(kLn2));
  return tile::fma(base, kLn2, tile::fma(base, kLn2Low, tile::log2(sum) * kLn2));
}

// The rows of one thread. Exact for any base: rounding is relative, sums are float32, and what underflows is 2^-126 of
// the row's largest probability or less. NaN scores poison their row; a score of +inf does, as it would by definition.
template <int kRows>
struct OnlineSoftmax {
  float base[kRows];  // log2 units; equal in all threads that share a row
  float sum[kRows];   // of the probabilities that this thread made

  CUFLASH_DEVICE void clear() {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      base[row] = kNoBase;
      sum[row] = 0.0f;
    }
  }

  // Whether a score (log2 units) stands too far above the base. False for NaN.
  CUFLASH_DEVICE bool is_outgrown(int row, float score) const { return score > base[row] + kBaseSlack; }

  CUFLASH_DEVICE bool has_coarse_base() const {
    bool found = false;
#pragma unroll
    for (int row = 0; row < kRows; ++row) found |= tile::magnitude(base[row]) > kCoarseBase && base[row] != kNoBase;
    return found;
  }

  // Moves the base up to the row's maximum so far and returns the factor for all that was accumulated before.
  CUFLASH_DEVICE float raise_base(int row, float row_max) {
    const float raised = tile::larger(base[row], row_max);
    const float factor = tile::exp2(base[row] - raised);  // 0 for the first keys of a row
    base[row] = raised;
    sum[row] *= factor;
    return factor;
  }
};

}  // namespace cuflash
