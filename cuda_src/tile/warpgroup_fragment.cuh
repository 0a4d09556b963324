// The accumulator of a warpgroup, [64, N] floats over 128 threads: which rows and columns a thread holds, how the four
// lanes that share a row work together, and how they write it out.
#pragma once
#include "ptx/element_types.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace cuflash::tile {

inline constexpr int kFragmentRows = 2;  // rows of a thread; they lie eight apart

// Element i of a fragment stands in row fragment_row() + 8 * row_of(i), column fragment_col() + col_of(i).
CUFLASH_DEVICE int fragment_row() { return ptx::thread_index() % 128 / 32 * 16 + ptx::lane_index() / 4; }
CUFLASH_DEVICE int fragment_col() { return ptx::lane_index() % 4 * 2; }
CUFLASH_DEVICE constexpr int row_of(int i) { return i / 2 % 2; }
CUFLASH_DEVICE constexpr int col_of(int i) { return i / 4 * 8 + i % 2; }

// Over the four lanes that hold a row.
CUFLASH_DEVICE float quad_sum(float value) {
  value += ptx::shuffle_xor(value, 1);
  return value + ptx::shuffle_xor(value, 2);
}
CUFLASH_DEVICE float quad_max(float value) {
  value = ptx::max(value, ptx::shuffle_xor(value, 1));
  return ptx::max(value, ptx::shuffle_xor(value, 2));
}

template <int kCount>
CUFLASH_DEVICE void row_max(const float (&values)[kCount], float (&largest)[kFragmentRows]) {
  largest[0] = largest[1] = -ptx::kInfinity;
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    largest[0] = ptx::max(largest[0], ptx::max(values[i], values[i + 1]));
    largest[1] = ptx::max(largest[1], ptx::max(values[i + 2], values[i + 3]));
  }
  largest[0] = quad_max(largest[0]);
  largest[1] = quad_max(largest[1]);
}

template <int kCount>
CUFLASH_DEVICE void scale_rows(float (&values)[kCount], const float (&factor)[kFragmentRows]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] *= factor[row_of(i)];
}

// An accumulator packed in pairs is the A operand of the next product, register for register.
template <class Element, int kCount>
CUFLASH_DEVICE void pack_fragment(const float (&values)[kCount], uint32_t (&packed)[kCount / 2]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) packed[i] = ptx::pack2<Element>(values[2 * i], values[2 * i + 1]);
}

// Four lanes with four words each: lane r, word c becomes lane c, word r. The words of one lane are its column pairs in
// four chunks of eight columns; afterwards a lane holds one whole chunk, 16 neighbouring bytes.
CUFLASH_DEVICE u32x4 quad_transpose(uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) {
  const bool odd = ptx::lane_index() & 1, high = ptx::lane_index() & 2;
  const uint32_t near0 = ptx::shuffle_xor(odd ? w0 : w1, 1), near1 = ptx::shuffle_xor(odd ? w2 : w3, 1);
  w0 = odd ? near0 : w0;
  w1 = odd ? w1 : near0;
  w2 = odd ? near1 : w2;
  w3 = odd ? w3 : near1;
  const uint32_t far0 = ptx::shuffle_xor(high ? w0 : w2, 2), far1 = ptx::shuffle_xor(high ? w1 : w3, 2);
  w0 = high ? far0 : w0;
  w2 = high ? w2 : far0;
  w1 = high ? far1 : w1;
  w3 = high ? w3 : far1;
  return {w0, w1, w2, w3};
}

// Writes one of the thread's two rows in 16-byte pieces: kCount / 4 column pairs that the lane holds of row row_gmem.
// Every lane of the warp takes part in the exchange; only lanes with is_inside write, and only columns below num_cols.
template <class Element, int kHalf, int kCount>
CUFLASH_DEVICE void store_row(const float (&values)[kCount], Element* row_gmem, int num_cols, bool is_inside) {
  constexpr int kPairs = kCount / 4;
  const int chunk = ptx::lane_index() % 4;
#pragma unroll
  for (int first = 0; first < kPairs; first += 4) {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int pair = first + i;
      if (pair < kPairs) words[i] = ptx::pack2<Element>(values[4 * pair + 2 * kHalf], values[4 * pair + 2 * kHalf + 1]);
    }
    const u32x4 piece = quad_transpose(words[0], words[1], words[2], words[3]);
    const int col = 8 * (first + chunk);
    if (is_inside && col < num_cols) ptx::store_global(row_gmem + col, piece);
  }
}

// The same for rows that cannot be written in 16-byte pieces: one element at a time, columns any distance apart.
template <class Element, int kHalf, int kCount>
CUFLASH_DEVICE void store_row_elements(const float (&values)[kCount], Element* row_gmem, int64_t col_stride,
                                       int num_cols, bool is_inside) {
#pragma unroll
  for (int i = 2 * kHalf; i < kCount; i += 4) {
    const int col = fragment_col() + col_of(i);
    if (!is_inside || col >= num_cols) continue;
    ptx::store_global(row_gmem + col * col_stride, ptx::from_float<Element>(values[i]));
    ptx::store_global(row_gmem + (col + 1) * col_stride, ptx::from_float<Element>(values[i + 1]));
  }
}

// The same row unrounded: a lane writes its own column pairs.
template <int kHalf, int kCount>
CUFLASH_DEVICE void store_float_row(const float (&values)[kCount], float* row_gmem, int num_cols, bool is_inside) {
#pragma unroll
  for (int i = 2 * kHalf; i < kCount; i += 4) {
    const int col = fragment_col() + col_of(i);
    if (is_inside && col < num_cols) ptx::store_global(row_gmem + col, f32x2{values[i], values[i + 1]});
  }
}

}  // namespace cuflash::tile
