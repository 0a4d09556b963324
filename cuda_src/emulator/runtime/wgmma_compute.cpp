// Gathers accumulators of 128 threads and operands from shared memory, multiplies, scatters.
#include "emulator/runtime/wgmma_compute.h"

#include <memory>

#include "emulator/runtime/products.h"

namespace cuflash::emulator {

constexpr int kRows = 64, kDepth = 16, kMaxColumns = 256;

struct Scratch {
  alignas(64) float a[kRows * kDepth], b[kDepth * kMaxColumns], d[kRows * kMaxColumns];
  alignas(64) uint16_t half[kDepth * kMaxColumns];
};
// On the heap: 92 KB of thread-local storage would not fit where torch is loaded, whose libraries use up the room that
// the C library keeps for libraries opened late. A worker thread keeps its scratch until it ends.
static Scratch& thread_scratch() {
  static thread_local const std::unique_ptr<Scratch> own(new Scratch);
  return *own;
}

static HopperThread& thread_of(Block& b, int warpgroup, int i) { return b.fibers[warpgroup * 128 + i].hopper; }

static void check_agreement(Block& b, int warpgroup, size_t number) {
  const WgmmaOp& first = thread_of(b, warpgroup, 0).product(number);
  for (int i = 1; i < 128; ++i) {
    const WgmmaOp& op = thread_of(b, warpgroup, i).product(number);
    const bool agrees = op.at.line == first.at.line && op.n == first.n && op.a_in_registers == first.a_in_registers &&
                        op.desc_b == first.desc_b && op.accumulate == first.accumulate && op.group == first.group &&
                        (op.a_in_registers || op.desc_a == first.desc_a);
    if (!agrees) {
      fail(warpgroup * 128 + i, op.at, "threads of the warpgroup disagree: thread %d issued another wgmma at line %d",
           warpgroup * 128, first.at.line);
    }
  }
}

// Rows of A by row, or of B by column of the product: to[row * row_pitch + k * k_pitch].
static void load_operand(Block& b, const Operand& operand, int rows, int row_pitch, int k_pitch, bool transposed) {
  Scratch& scratch = thread_scratch();
  operand.for_each_chunk(0, rows, [&](uint32_t address, int row, int k) {
    uint16_t chunk[8];
    std::memcpy(chunk, b.shared + (address - kSharedBase), sizeof chunk);
    for (int i = 0; i < 8; ++i) {
      const int at_row = transposed ? row + i : row, at_k = transposed ? k : k + i;
      scratch.half[at_row * row_pitch + at_k * k_pitch] = chunk[i];
    }
  });
}

static void load_a_registers(Block& b, int warpgroup, size_t number) {
  Scratch& scratch = thread_scratch();
  for (int i = 0; i < 128; ++i) {
    const WgmmaOp& op = thread_of(b, warpgroup, i).product(number);
    const int row = i / 32 * 16 + i % 32 / 4, k = i % 4 * 2;
    for (int r = 0; r < 4; ++r) std::memcpy(&scratch.half[(row + r % 2 * 8) * kDepth + k + r / 2 * 8], &op.a[r], 4);
  }
}

static float* values_of(Block& b, int warpgroup, int i, size_t number) {
  HopperThread& h = thread_of(b, warpgroup, i);
  const float* d = h.product(number).d;
  for (Accumulator& accumulator : h.accumulators) {
    if (accumulator.registers == d) return accumulator.values;
  }
  fail(warpgroup * 128 + i, h.product(number).at, "the accumulators of this wgmma are gone");
}

// Between the values of 128 threads and the 64 x n matrix.
template <bool kGather>
static void exchange(Block& b, int warpgroup, size_t number, int n) {
  Scratch& scratch = thread_scratch();
  for (int i = 0; i < 128; ++i) {
    float* values = values_of(b, warpgroup, i, number);
    const int row = i / 32 * 16 + i % 32 / 4, column = i % 4 * 2;
    for (int j = 0; j < n / 8; ++j) {
      for (int h = 0; h < 2; ++h) {
        float* place = &scratch.d[(row + h * 8) * n + j * 8 + column];
        if (kGather) std::memcpy(place, values + j * 4 + h * 2, 8);
        else std::memcpy(values + j * 4 + h * 2, place, 8);
      }
    }
  }
}

static void multiply(Block& b, int warpgroup, size_t number) {
  Scratch& scratch = thread_scratch();
  const WgmmaOp& op = thread_of(b, warpgroup, 0).product(number);
  const Operand a(op.desc_a, op.trans_a), bb(op.desc_b, op.trans_b);
  if (op.a_in_registers) {
    load_a_registers(b, warpgroup, number);
  } else {
    load_operand(b, a, kRows, kDepth, 1, op.trans_a);
    end_reads(b, a, kRows);
  }
  widen(scratch.half, scratch.a, kRows * kDepth, op.is_bfloat16);
  load_operand(b, bb, op.n, 1, op.n, op.trans_b);
  end_reads(b, bb, op.n);
  widen(scratch.half, scratch.b, kDepth * op.n, op.is_bfloat16);
  if (!op.accumulate) std::memset(scratch.d, 0, sizeof(float) * kRows * op.n);
  multiply_add(scratch.d, scratch.a, scratch.b, kRows, kDepth, op.n);
}

void compute_products(Block& b, int warpgroup, size_t end) {
  size_t& next = b.hopper.warpgroups[warpgroup].computed;
  // A run of products into the same accumulators keeps them here from one to the next.
  const float* held = nullptr;
  for (; next < end; ++next) {
    check_agreement(b, warpgroup, next);
    const WgmmaOp& op = thread_of(b, warpgroup, 0).product(next);
    if (held != op.d) {
      if (held != nullptr) exchange<false>(b, warpgroup, next - 1, thread_of(b, warpgroup, 0).product(next - 1).n);
      exchange<true>(b, warpgroup, next, op.n);
      held = op.d;
    }
    multiply(b, warpgroup, next);
  }
  if (held != nullptr) exchange<false>(b, warpgroup, next - 1, thread_of(b, warpgroup, 0).product(next - 1).n);
}

}  // namespace cuflash::emulator
