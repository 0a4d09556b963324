// Operands of wgmma in shared memory, found through their descriptors.
#pragma once
#include "emulator/runtime/hopper.h"

namespace cuflash::emulator {

// One operand of depth 16: rows along M or N.
class Operand {
 public:
  Operand(uint64_t descriptor, bool is_transposed) : transposed_(is_transposed) {
    const auto field = [&](int shift) { return static_cast<uint32_t>(descriptor >> shift & 0x3fff) << 4; };
    start_ = field(0);
    leading_ = field(16);
    stride_ = field(32);
    const auto code = static_cast<int>(descriptor >> 62);
    mode_ = code == 0 ? 0 : 4 - code;  // descriptors count 128, 64, 32 bytes as 1, 2, 3
    base_offset_ = static_cast<int>(descriptor >> 49 & 7);
  }

  int base_offset() const { return base_offset_; }

  // Calls visit(address, row, k) for every chunk of 16 bytes that holds rows [first, first + rows): eight values of k
  // at one row, or in transposed form eight rows at one k.
  template <class Visit>
  void for_each_chunk(int first, int rows, Visit&& visit) const {
    if (transposed_) {
      for (int k = 0; k < 16; ++k) {
        for (int row = first; row < first + rows; row += 8) visit(transposed_chunk(row, k), row, k);
      }
    } else {
      for (int row = first; row < first + rows; ++row) {
        for (int k = 0; k < 16; k += 8) visit(plain_chunk(row, k), row, k);
      }
    }
  }

  // Eight-row groups are stride_ bytes apart; without a swizzle the two halves of a row are leading_ bytes apart.
  uint32_t plain_chunk(int row, int k) const {
    const uint32_t group = static_cast<uint32_t>(row / 8) * stride_, in_group = static_cast<uint32_t>(row % 8);
    const uint32_t half = static_cast<uint32_t>(k / 8);
    const uint32_t offset = mode_ == 0 ? group + half * leading_ + in_group * 16
                                       : group + in_group * (16u << mode_) + half * 16;
    return swizzled(start_ + offset, mode_);
  }

  // Lines of one swizzle span along the rows, one line a k; eight lines make an atom.
  uint32_t transposed_chunk(int row, int k) const {
    const uint32_t atom = static_cast<uint32_t>(k / 8), line = static_cast<uint32_t>(k % 8);
    if (mode_ == 0) return start_ + static_cast<uint32_t>(row / 8) * stride_ + atom * leading_ + line * 16;
    const int span = 8 << mode_;  // elements
    const uint32_t offset = static_cast<uint32_t>(row / span) * leading_ + atom * stride_ + line * (16u << mode_) +
                            static_cast<uint32_t>(row % span) * 2;
    return swizzled(start_ + offset, mode_);
  }

 private:
  uint32_t start_, leading_, stride_;
  int mode_, base_offset_;
  bool transposed_;
};

}  // namespace cuflash::emulator
