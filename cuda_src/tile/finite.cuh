// Operands without their NaN and infinite elements.
#pragma once
#include "tile/element.cuh"

namespace cuflash::tile {

// Zeros in place of elements that are not finite.
template <class Element>
CUFLASH_DEVICE Operand<Element> finite_part(Operand<Element> operand) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t signs = nonfinite_signs<Element>(operand.words[i]);
    if ((signs & 0x00008000u) != 0) operand.words[i] &= 0xffff0000u;
    if ((signs & 0x80000000u) != 0) operand.words[i] &= 0x0000ffffu;
  }
  return operand;
}
CUFLASH_DEVICE Operand<float> finite_part(Operand<float> operand) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool is_finite = (nonfinite_signs<float>(operand.big[i]) & kSignMask<float>) == 0;
    operand.big[i] = is_finite ? operand.big[i] : 0u;
    operand.small[i] = is_finite ? operand.small[i] : 0u;
  }
  return operand;
}

// A reader of operands, or with kCareful its finite parts.
template <bool kCareful, class Reader>
CUFLASH_DEVICE auto guarded(const Reader& reader) {
  return [reader](int tile, int step) {
    if constexpr (kCareful) return finite_part(reader(tile, step));
    else return reader(tile, step);
  };
}

CUFLASH_DEVICE bool is_finite(float value) { return ptx::abs(value) < ptx::kInfinity; }

}  // namespace cuflash::tile
