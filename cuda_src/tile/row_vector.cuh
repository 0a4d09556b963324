// A few neighbouring elements of one row on their way between global memory and float registers.
#pragma once
#include "ptx/element_types.cuh"
#include "ptx/memory.cuh"

namespace cuflash::tile {

// CopyBytes is the width of one access. The narrowest form (one element) takes any stride between columns; the wider
// ones need neighbouring columns side by side and the row aligned to CopyBytes, with a whole number of vectors a row.
template <class Element, int CopyBytes>
struct RowVector {
  static_assert(CopyBytes >= static_cast<int>(sizeof(Element)) && CopyBytes <= 16, "one element to 16 bytes");
  static constexpr int kElements = CopyBytes / sizeof(Element);
  float values[kElements];

  CUFLASH_DEVICE static RowVector load(const Element* row_gmem, int64_t col_stride, int col) {
    RowVector vector;
    if constexpr (kElements == 1) {
      vector.values[0] = ptx::to_float(ptx::load_global<Element>(row_gmem + col * col_stride));
    } else if constexpr (CopyBytes == 4) {
      unpack_word(ptx::load_global<uint32_t>(row_gmem + col), vector.values);
    } else {
      const Words words = ptx::load_global<Words>(row_gmem + col);
#pragma unroll
      for (int i = 0; i < kWords; ++i) unpack_word(words.word[i], vector.values + i * kPerWord);
    }
    return vector;
  }

  CUFLASH_DEVICE void store(Element* row_gmem, int64_t col_stride, int col) const {
    if constexpr (kElements == 1) {
      ptx::store_global(row_gmem + col * col_stride, ptx::from_float<Element>(values[0]));
    } else if constexpr (CopyBytes == 4) {
      ptx::store_global(row_gmem + col, pack_word(values));
    } else {
      Words words;
#pragma unroll
      for (int i = 0; i < kWords; ++i) words.word[i] = pack_word(values + i * kPerWord);
      ptx::store_global(row_gmem + col, words);
    }
  }

 private:
  static constexpr int kPerWord = 4 / sizeof(Element) > 0 ? 4 / sizeof(Element) : 1;
  static constexpr int kWords = CopyBytes / 4 > 0 ? CopyBytes / 4 : 1;
  struct alignas(CopyBytes) Words {
    uint32_t word[kWords];
  };

  CUFLASH_DEVICE static void unpack_word(uint32_t word, float* out) {
    if constexpr (sizeof(Element) == 4) {
      out[0] = ptx::bit_cast<float>(word);
    } else {
      ptx::unpack2<Element>(word, out[0], out[1]);
    }
  }

  CUFLASH_DEVICE static uint32_t pack_word(const float* in) {
    if constexpr (sizeof(Element) == 4) {
      return ptx::bit_cast<uint32_t>(in[0]);
    } else {
      return ptx::pack2<Element>(in[0], in[1]);
    }
  }
};

}  // namespace cuflash::tile
