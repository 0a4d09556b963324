// mma.sync: gathers the fragments of 32 lanes, multiplies, and scatters the sums back.
#include "emulator/runtime/products.h"

#include <cmath>

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "emulator/runtime/half.h"
#include "emulator/runtime/state.h"

namespace cuflash::emulator {

// Eight floats that the compiler keeps in a register where the host has one that wide.
using Line = float __attribute__((vector_size(32)));

void widen(const uint16_t* from, float* to, int count, bool is_bfloat16) {
  if (is_bfloat16) {
    for (int i = 0; i < count; ++i) to[i] = float_from_bfloat16(from[i]);
    return;
  }
#ifdef __F16C__
  for (int i = 0; i < count; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
#else
  for (int i = 0; i < count; ++i) to[i] = float_from_float16(from[i]);
#endif
}

void multiply_add(float* d, const float* a, const float* b, int rows, int depth, int n) {
  constexpr int kRows = 4;  // hide the latency of one another's sums and share the loads of b
  for (int column = 0; column < n; column += 8) {
    for (int row = 0; row < rows; row += kRows) {
      Line sums[kRows];
      for (int i = 0; i < kRows; ++i) sums[i] = *reinterpret_cast<const Line*>(d + (row + i) * n + column);
      for (int k = 0; k < depth; ++k) {
        const Line line = *reinterpret_cast<const Line*>(b + k * n + column);
        for (int i = 0; i < kRows; ++i) sums[i] += a[(row + i) * depth + k] * line;
      }
      for (int i = 0; i < kRows; ++i) *reinterpret_cast<Line*>(d + (row + i) * n + column) = sums[i];
    }
  }
}

struct Fragments {
  const uint32_t* a;
  float* c;
  uint32_t b[2];
};

template <int kDepth>
struct Operands {
  alignas(64) float a[16][kDepth], b[kDepth][8], c[16][8];
};

// Toward zero, as the tensor core rounds its sums: many sums of one sign then drift by half a unit each, which a kernel
// that promises float32 accuracy must not let happen.
static float truncated(double value) {
  const float nearest = static_cast<float>(value);
  if (!(std::fabs(static_cast<double>(nearest)) > std::fabs(value)) || std::isinf(nearest)) return nearest;
  return float_from_bits(bits_from_float(nearest) - 1);
}

// c += a * b for tf32: exact products, one exact sum, one rounding.
static void multiply(Operands<8>& x) {
  for (int row = 0; row < 16; ++row) {
    double sums[8];
    for (int n = 0; n < 8; ++n) sums[n] = x.c[row][n];
    for (int k = 0; k < 8; ++k) {
      for (int n = 0; n < 8; ++n) sums[n] += static_cast<double>(x.a[row][k]) * x.b[k][n];
    }
    for (int n = 0; n < 8; ++n) x.c[row][n] = truncated(sums[n]);
  }
}

// c += a * b for 16-bit elements, whose own rounding is far above that of the sums.
static void multiply(Operands<16>& x) {
  constexpr int kDepth = 16;
  const auto* b = reinterpret_cast<const Line*>(x.b);
  auto* c = reinterpret_cast<Line*>(x.c);
  for (int row = 0; row < 16; row += 4) {  // four rows hide the latency of one another's sums
    // The products of one instruction meet one another before the accumulator, as on the tensor core: adding them to it
    // one by one would round at its size every time.
    Line sums[4] = {};
    for (int k = 0; k < kDepth; ++k) {
      for (int i = 0; i < 4; ++i) sums[i] += x.a[row + i][k] * b[k];
    }
    for (int i = 0; i < 4; ++i) c[row + i] += sums[i];
  }
}

template <int kDepth>
static void finish(Operands<kDepth>& x, void** lanes) {
  for (int lane = 0; lane < 32; ++lane) {
    const float* c = static_cast<Fragments*>(lanes[lane])->c;
    std::memcpy(&x.c[lane / 4][lane % 4 * 2], c, 8);
    std::memcpy(&x.c[lane / 4 + 8][lane % 4 * 2], c + 2, 8);
  }
  multiply(x);
  for (int lane = 0; lane < 32; ++lane) {
    float* c = static_cast<Fragments*>(lanes[lane])->c;
    std::memcpy(c, &x.c[lane / 4][lane % 4 * 2], 8);
    std::memcpy(c + 2, &x.c[lane / 4 + 8][lane % 4 * 2], 8);
  }
}

template <bool kBfloat16>
static void execute_16bit(Block& b, int warp) {
  void** lanes = b.warps[warp].arguments;
  Operands<16> x;
  uint16_t half_a[16][16], half_b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto* f = static_cast<Fragments*>(lanes[lane]);
    const int g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) std::memcpy(&half_a[g + i % 2 * 8][t + i / 2 * 8], &f->a[i], 4);
    for (int i = 0; i < 2; ++i) {
      half_b[t + i * 8][g] = static_cast<uint16_t>(f->b[i]);
      half_b[t + i * 8 + 1][g] = static_cast<uint16_t>(f->b[i] >> 16);
    }
  }
  widen(half_a[0], x.a[0], 256, kBfloat16);
  widen(half_b[0], x.b[0], 128, kBfloat16);
  finish(x, lanes);
}

// The tensor core reads the upper 19 bits of a tf32 register.
static float truncate_tf32(uint32_t bits) { return float_from_bits(bits & 0xffffe000u); }

static void execute_tf32(Block& b, int warp) {
  void** lanes = b.warps[warp].arguments;
  Operands<8> x;
  for (int lane = 0; lane < 32; ++lane) {
    const auto* f = static_cast<Fragments*>(lanes[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) x.a[g + i % 2 * 8][t + i / 2 * 4] = truncate_tf32(f->a[i]);
    for (int i = 0; i < 2; ++i) x.b[t + i * 4][g] = truncate_tf32(f->b[i]);
  }
  finish(x, lanes);
}

void mma(MmaKind kind, float* c, const uint32_t* a, uint32_t b0, uint32_t b1, Location at) {
  static const Collective ops[] = {
      {"mma.f16", execute_16bit<false>}, {"mma.bf16", execute_16bit<true>}, {"mma.tf32", execute_tf32}};
  Fragments fragments{a, c, {b0, b1}};
  if (block->current % 32 == 0) block->statistics.mma++;
  meet(ops[static_cast<int>(kind)], &fragments, at);
}

}  // namespace cuflash::emulator
