// A tile in shared memory, addressed by row and column, and the readers that fetch operands of products from it.
#pragma once
#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "tile/element.cuh"
#include "tile/swizzle.cuh"

namespace cuflash::tile {

// [kRows, kCols], row-major and swizzled. The type holds no address: stages of a ring share it.
template <class Element_, int kRows_, int kCols_>
struct SharedTile {
  using Element = Element_;
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kRowBytes = kCols * static_cast<int>(sizeof(Element));
  static constexpr int kBytes = kRows * kRowBytes;
  using Pattern = Swizzle<kRowBytes>;

  // Address of one element; `base` is the address of the tile.
  CUFLASH_DEVICE static uint32_t address(uint32_t base, int row, int col) {
    const int byte = col * static_cast<int>(sizeof(Element));
    return base + Pattern::offset(row, byte / 16) + byte % 16;
  }
};

// Order of the depth (the summed index) inside one float32 product; 16-bit products know one order only. Both operands
// of a product must agree.
enum class Depth {
  kNatural,  // 0 1 2 3 4 5 6 7
  kPaired,   // 0 2 4 6 1 3 5 7: that of an accumulator used as operand (see fragment.cuh)
};

// Reads operands whose rows are the product's rows (A) or columns (B) and whose columns are the depth: [16 i, depth].
// Rows are A's when kIsA. float32 comes in natural depth.
template <class Tile, bool kIsA>
struct RowReader {
  using Element = typename Tile::Element;
  static constexpr int kDepth = Operand<Element>::kDepth;
  uint32_t lane_address;

  CUFLASH_DEVICE explicit RowReader(uint32_t tile_smem, int first_row = 0) {
    const int lane = ptx::lane_index();
    const int row = kIsA ? lane % 16 : lane % 8 + lane / 16 * 8;
    const int chunk = kIsA ? lane / 16 : lane / 8 % 2;
    lane_address = tile_smem + first_row * Tile::kRowBytes + Tile::Pattern::offset(row, chunk);
  }

  // The reader of the same tile at another address: a stage of a ring.
  CUFLASH_DEVICE RowReader moved(uint32_t bytes) const {
    RowReader reader = *this;
    reader.lane_address += bytes;
    return reader;
  }

  // Rows [16 tile, 16 tile + 16), depth [kDepth step, kDepth step + kDepth) = two chunks for every element type.
  CUFLASH_DEVICE Fragment<Element> operator()(int tile, int step) const {
    Fragment<Element> fragment;
    ptx::ldmatrix_x4(fragment.words, Tile::Pattern::advance(lane_address, step * 2) + tile * 16 * Tile::kRowBytes);
    return fragment;
  }
};

template <class Tile>
using AReader = RowReader<Tile, true>;
template <class Tile>
using BReader = RowReader<Tile, false>;

// Reads operands whose rows are the depth and whose columns are the product's rows (A) or columns (B): [depth, 16 i].
template <class Tile, bool kIsA, Depth kOrder = Depth::kPaired>
struct ColumnReader {
  using Element = typename Tile::Element;
  static constexpr int kDepth = Operand<Element>::kDepth;
  uint32_t lane_address;

  // Warps that take turns over column tiles start at `first_tile` and then count in a power of two above it.
  CUFLASH_DEVICE explicit ColumnReader(uint32_t tile_smem, int first_tile = 0) {
    const int lane = ptx::lane_index();
    const int row = kIsA ? lane % 8 + lane / 16 * 8 : lane % 16;
    const int chunk = kIsA ? lane / 8 % 2 : lane / 16;
    lane_address = tile_smem + Tile::Pattern::offset(row, chunk + first_tile * 2);
  }

  CUFLASH_DEVICE ColumnReader moved(uint32_t bytes) const {
    ColumnReader reader = *this;
    reader.lane_address += bytes;
    return reader;
  }

  CUFLASH_DEVICE Fragment<Element> operator()(int tile, int step) const {
    Fragment<Element> fragment;
    const uint32_t row_address = Tile::Pattern::advance(lane_address, tile * 2) + step * 16 * Tile::kRowBytes;
    ptx::ldmatrix_x4_trans(fragment.words, row_address);
    return fragment;
  }
};

// ldmatrix transposes 16-bit elements only; 32-bit ones are loaded one by one. In paired order the four rows that a
// warp touches are two apart, which the swizzle spreads over all banks; in natural order two lanes share a bank.
template <class Tile, bool kIsA, Depth kOrder>
  requires(sizeof(typename Tile::Element) == 4)
struct ColumnReader<Tile, kIsA, kOrder> {
  static constexpr int kDepth = Operand<float>::kDepth;
  uint32_t near_address, far_address;  // of the lane's two depths

  CUFLASH_DEVICE explicit ColumnReader(uint32_t tile_smem, int first_tile = 0) {
    const int lane = ptx::lane_index();
    const int near = kOrder == Depth::kPaired ? lane % 4 * 2 : lane % 4;
    const int far = kOrder == Depth::kPaired ? near + 1 : near + 4;
    near_address = Tile::address(tile_smem, near, first_tile * 16 + lane / 4);
    far_address = Tile::address(tile_smem, far, first_tile * 16 + lane / 4);
  }

  CUFLASH_DEVICE ColumnReader moved(uint32_t bytes) const {
    ColumnReader reader = *this;
    reader.near_address += bytes;
    reader.far_address += bytes;
    return reader;
  }

  CUFLASH_DEVICE Fragment<float> operator()(int tile, int step) const {
    const uint32_t step_bytes = step * 8 * Tile::kRowBytes;
    const auto word = [&](uint32_t address, int half) {
      return ptx::load_shared<uint32_t>(Tile::Pattern::advance(address, tile * 4 + half * 2) + step_bytes);
    };
    const uint32_t near0 = word(near_address, 0), near1 = word(near_address, 1);
    const uint32_t far0 = word(far_address, 0), far1 = word(far_address, 1);
    // A counts rows first, then depth; B counts depth first, then the half of the columns.
    return {{near0, kIsA ? near1 : far0, kIsA ? far0 : near1, far1}};
  }
};

template <class Tile, Depth kOrder = Depth::kPaired>
using AColumnReader = ColumnReader<Tile, true, kOrder>;
template <class Tile, Depth kOrder = Depth::kPaired>
using BColumnReader = ColumnReader<Tile, false, kOrder>;

}  // namespace cuflash::tile
