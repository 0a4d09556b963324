// From rows in global memory to a tile in shared memory, with tails in both directions filled with zeros.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "tile/finite.cuh"
#include "tile/shared_tile.cuh"

namespace cuflash::tile {

// One thread's share of copying tiles of one matrix. An access moves kCopyBytes: 16, 8 or 4 with cp.async, for rows
// whose elements lie side by side and whose start is aligned to it; or a single element, at any distance between
// elements (cp.async for 32-bit ones, through a register for 16-bit ones). kPartialCols tells that rows hold fewer than
// Tile::kCols elements; then the last access of a row may be partly valid, and only its valid bytes are read.
template <class Tile, int kThreads, int kCopyBytes, bool kPartialCols>
struct TileCopy {
  using Element = typename Tile::Element;
  static constexpr int kElementBytes = sizeof(Element);
  static constexpr bool kSingle = kCopyBytes == kElementBytes;
  static_assert(kCopyBytes == 16 || kCopyBytes == 8 || kCopyBytes == 4 || kSingle, "16, 8, 4 bytes or one element");
  // Threads of a group take neighbouring accesses of a row, so that global reads and shared writes are whole lines.
  static constexpr int kGroupBytes = Tile::Pattern::kGroup * 16;
  static constexpr int kGroupCols = kGroupBytes / kElementBytes;
  static constexpr int kGroupThreads = kGroupBytes / kCopyBytes;
  static constexpr int kGroups = Tile::kRowBytes / kGroupBytes;
  static constexpr int kRowStep = kThreads / kGroupThreads;
  static constexpr int kRowSteps = (Tile::kRows + kRowStep - 1) / kRowStep;
  static_assert(kThreads % kGroupThreads == 0, "a row's group of accesses is shared by whole groups of threads");

  const Element* thread_gmem;  // the element of row 0 that this thread copies first
  int64_t row_stride;          // elements
  int64_t dim_stride;          // elements; 1 unless kSingle
  int valid_bytes;             // from this thread's first access to the end of the row, as if elements lay side by side

  CUFLASH_DEVICE TileCopy(const Element* matrix_gmem, int64_t row_stride, int64_t dim_stride, int cols)
      : row_stride(row_stride), dim_stride(kSingle ? dim_stride : 1) {
    const int first_col = thread_byte() / kElementBytes;
    thread_gmem = matrix_gmem + thread_row() * row_stride + first_col * this->dim_stride;
    valid_bytes = cols * kElementBytes - thread_byte();
  }

  // Rows [first_row, first_row + kRows), all of which exist.
  CUFLASH_DEVICE void load(uint32_t tile_smem, int first_row) const { copy<false>(tile_smem, first_row, 0, 0); }

  // The same; rows outside [begin, end) are not read and become zeros.
  CUFLASH_DEVICE void load_between(uint32_t tile_smem, int first_row, int begin, int end) const {
    copy<true>(tile_smem, first_row, begin, end);
  }

  // Whether any element that this thread has copied is NaN or infinite, or as a float32 too large for Values::kFinite.
  // Needs no barrier: a thread sees its own copies after cp_async_wait.
  CUFLASH_DEVICE bool has_nonfinite(uint32_t tile_smem) const {
    NonfiniteSearch<Element> search;
    visit([&](int row_step, int group) {
      const uint32_t address = address_of(tile_smem, row_step, group);
      if constexpr (kCopyBytes == 16) {
        const u32x4 words = ptx::load_shared<u32x4>(address);
        search.take(words.x), search.take(words.y), search.take(words.z), search.take(words.w);
      } else if constexpr (kCopyBytes == 8) {
        const u32x2 words = ptx::load_shared<u32x2>(address);
        search.take(words.x), search.take(words.y);
      } else if constexpr (kCopyBytes == 4) {
        search.take(ptx::load_shared<uint32_t>(address));
      } else {
        search.take(ptx::load_shared<uint16_t>(address));
      }
    });
    return search.has_found();
  }

  // Clears those of them that are NaN or infinite.
  CUFLASH_DEVICE void clear_nonfinite(uint32_t tile_smem) const {
    visit([&](int row_step, int group) {
      const uint32_t address = address_of(tile_smem, row_step, group);
      if constexpr (kCopyBytes == 2) {
        const uint32_t word = ptx::load_shared<uint16_t>(address);
        ptx::store_shared(address, static_cast<uint16_t>(finite_part<Element>(word)));
      } else {
#pragma unroll
        for (int byte = 0; byte < kCopyBytes; byte += 4) {
          ptx::store_shared(address + byte, finite_part<Element>(ptx::load_shared<uint32_t>(address + byte)));
        }
      }
    });
  }

 private:
  CUFLASH_DEVICE static int thread_row() { return ptx::thread_index() / kGroupThreads; }
  CUFLASH_DEVICE static int thread_byte() { return ptx::thread_index() % kGroupThreads * kCopyBytes; }

  CUFLASH_DEVICE static uint32_t address_of(uint32_t tile_smem, int row_step, int group) {
    if constexpr (kRowStep % Tile::Pattern::kPeriod == 0) {  // the pattern is the same in all of this thread's rows
      const uint32_t offset = Tile::Pattern::offset(thread_row(), thread_byte() / 16) + thread_byte() % 16;
      return tile_smem + offset + row_step * kRowStep * Tile::kRowBytes + group * kGroupBytes;
    } else {
      const int byte = thread_byte() + group * kGroupBytes;
      return tile_smem + Tile::Pattern::offset(thread_row() + row_step * kRowStep, byte / 16) + byte % 16;
    }
  }

  // Calls visit(row_step, group) for each of this thread's accesses. Narrow ones are many: a few steps at a time. Their
  // counter is opaque, or the compiler would count in addresses; ptxas (12.9, 13.0) then takes what it has counted for
  // the address it began with, and what a later loop copies lands elsewhere.
  static constexpr int kUnroll = kCopyBytes == 16 ? kRowSteps : ptx::min(4, kRowSteps);
  template <class Visit>
  CUFLASH_DEVICE static void visit(Visit visit) {
#pragma unroll 1
    for (int first_step = 0; first_step < kRowSteps; first_step += kUnroll) {
      const int first = kUnroll == kRowSteps ? 0 : ptx::opaque(first_step);
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int row_step = first + i;
        if (kRowSteps % kUnroll != 0 && row_step >= kRowSteps) return;
        if (Tile::kRows % kRowStep != 0 && thread_row() + row_step * kRowStep >= Tile::kRows) return;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) visit(row_step, group);
      }
    }
  }

  template <bool kBounded>
  CUFLASH_DEVICE void copy(uint32_t tile_smem, int first_row, int begin, int end) const {
    const Element* block_gmem = thread_gmem + first_row * row_stride;
    visit([&](int row_step, int group) {
      const int row = first_row + thread_row() + row_step * kRowStep;
      const Element* source = block_gmem + row_step * (kRowStep * row_stride) + group * kGroupCols * dim_stride;
      int valid = kPartialCols ? ptx::min(ptx::max(valid_bytes - group * kGroupBytes, 0), kCopyBytes) : kCopyBytes;
      if (kBounded && (row < begin || row >= end)) valid = 0;
      const uint32_t target = address_of(tile_smem, row_step, group);
      if constexpr (kCopyBytes == 2) {
        ptx::store_shared<uint16_t>(target, valid != 0 ? ptx::load_global<uint16_t>(source) : uint16_t{0});
      } else {
        ptx::cp_async<kCopyBytes>(target, source, valid);
      }
    });
  }
};

}  // namespace cuflash::tile
