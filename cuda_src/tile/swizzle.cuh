// Where a 16-byte chunk of a row-major tile lies in shared memory so that no access pattern meets a bank twice.
#pragma once
#include "ptx/platform.cuh"

namespace cuflash::tile {

// ldmatrix reads the same chunk of 8 neighbouring rows; the banks repeat after 8 chunks. Rows of 8, 16, ... chunks
// start in the same bank, so the row's last three bits are mixed into the chunk. Rows whose number of chunks divides by
// 4 or 2 only spread over 2 or 4 starting banks by themselves; then fewer bits of the row are mixed into fewer bits
// of the chunk, which keeps every row's chunks inside the row.
template <int kRowBytes>
struct Swizzle {
  static_assert(kRowBytes % 32 == 0, "a row is a whole number of 32-byte pairs of chunks");
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kGroup = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;  // chunks that trade places
  static constexpr int kPeriod = 8;                                              // rows after which the pattern repeats

  // Bytes from the start of the tile, which is aligned to 128 bytes.
  CUFLASH_DEVICE static uint32_t offset(int row, int chunk) {
    const int mixed = chunk ^ (row / (kPeriod / kGroup) % kGroup);
    return static_cast<uint32_t>(row * kRowBytes + mixed * 16);
  }

  // The address that is `chunks` further along the row of an address made by offset(). The chunk there has none of the
  // bits of `chunks` set, so the sum of chunks is an exclusive or, and the pattern commutes with it.
  CUFLASH_DEVICE static uint32_t advance(uint32_t address, int chunks) {
    const int inside = chunks % kGroup;
    return (address ^ static_cast<uint32_t>(inside * 16)) + static_cast<uint32_t>((chunks - inside) * 16);
  }
};

}  // namespace cuflash::tile
