// Operands without their NaN and infinite elements, and the search for them.
#pragma once
#include "tile/fragment.cuh"

namespace cuflash::tile {

// Zeros in place of elements that are not finite.
template <class Element>
CUFLASH_DEVICE uint32_t finite_part(uint32_t word) {
  const uint32_t signs = nonfinite_signs<Element>(word);
  if constexpr (sizeof(Element) == 4) return (signs & 0x80000000u) != 0 ? 0u : word;
  if ((signs & 0x00008000u) != 0) word &= 0xffff0000u;
  if ((signs & 0x80000000u) != 0) word &= 0x0000ffffu;
  return word;
}
template <class Element>
CUFLASH_DEVICE Fragment<Element> finite_part(Fragment<Element> fragment) {
#pragma unroll
  for (int i = 0; i < 4; ++i) fragment.words[i] = finite_part<Element>(fragment.words[i]);
  return fragment;
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


template <class C>
CUFLASH_DEVICE bool has_nan(C& c) {
  bool is_nan = false;
  c.for_each([&](float& value, int, int, int) { is_nan |= value != value; });
  return is_nan;
}

}  // namespace cuflash::tile
