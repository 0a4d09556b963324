// A 16-bit tile in shared memory as TMA writes it and wgmma reads it: slabs of 64 columns, each row of a slab 128 bytes
// with its eight 16-byte chunks exchanged by the 128-byte swizzle.
#pragma once
#include "ptx/platform.cuh"

namespace cuflash::tile {

inline constexpr int kSlabCols = 64;       // elements: one box row fills the 128 bytes of the swizzle pattern
inline constexpr int kSlabRowBytes = 128;  // bytes
inline constexpr int kPatternBytes = 1024; // bytes: the swizzle repeats every eight rows; tiles start on this boundary

// Columns beyond kCols exist in the last slab (TMA fills them with zeros) and are never multiplied.
template <int kRows, int kCols>
struct SlabTile {
  static_assert(kRows % 8 == 0, "a slab is a whole number of swizzle patterns of eight rows");
  static constexpr int kSlabs = (kCols + kSlabCols - 1) / kSlabCols;
  static constexpr int kSlabBytes = kRows * kSlabRowBytes;
  static constexpr int kBytes = kSlabs * kSlabBytes;

  // Address of one element pair; col is even.
  CUFLASH_DEVICE static uint32_t address(uint32_t tile_smem, int row, int col) {
    const int chunk = (col % kSlabCols / 8) ^ (row % 8);
    return tile_smem + (col / kSlabCols) * kSlabBytes + row * kSlabRowBytes + chunk * 16 + col % 8 * 2;
  }
};

// What wgmma needs to know of a tile: where it starts and how far its 8-row groups (stride) and slabs (leading) lie
// apart, in bytes. The leading distance counts only when the 64-wide side of the tile is the M or N side.
CUFLASH_DEVICE uint64_t slab_descriptor(uint32_t tile_smem, uint32_t leading_bytes) {
  constexpr uint64_t kSwizzle128 = 1;
  return static_cast<uint64_t>((tile_smem & 0x3ffff) >> 4) | static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<uint64_t>(kPatternBytes >> 4) << 32 | kSwizzle128 << 62;
}

// Distance between two start addresses inside one descriptor.
CUFLASH_DEVICE constexpr uint64_t descriptor_step(uint32_t bytes) { return bytes >> 4; }

}  // namespace cuflash::tile
