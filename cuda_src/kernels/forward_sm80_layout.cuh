// How the sm_80 forward kernel shares its work: blocks over the grid, rows over warps, tiles over shared memory.
#pragma once
#include "attention/sequence.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"
#include "tile/arithmetic.cuh"
#include "tile/copy.cuh"
#include "tile/shared_tile.cuh"

namespace cuflash {

// What follows from a Config: how warps share the block and where tiles lie in shared memory.
template <class Config>
struct ForwardLayout {
  using Element = typename Config::Element;
  static constexpr int kDepth = tile::Operand<Element>::kDepth;
  static constexpr int kThreads = Config::kWarps * 32;
  static constexpr int kWarpRows = Config::kBlockQ / Config::kWarps;
  static constexpr int kRowTiles = kWarpRows / 16;  // two of them let each fragment of keys and values serve twice
  static_assert(kRowTiles * 16 * Config::kWarps == Config::kBlockQ, "a warp owns whole tiles of 16 rows");
  static_assert(Config::kBlockK % 16 == 0 && Config::kHeadDim % 16 == 0 && Config::kHeadDimV % 16 == 0,
                "tiles are made of 16 x 16 pieces");
  static_assert(Config::kStages == 1 || Config::kStages == 2, "one buffer each for keys and values, or two");

  using QTile = tile::SharedTile<Element, Config::kBlockQ, Config::kHeadDim>;
  using KTile = tile::SharedTile<Element, Config::kBlockK, Config::kHeadDim>;
  using VTile = tile::SharedTile<Element, Config::kBlockK, Config::kHeadDimV>;
  using OutTile = tile::SharedTile<Element, Config::kBlockQ, Config::kHeadDimV>;
  static constexpr int kKeys = QTile::kBytes;  // bytes from the start; queries, and later the output, start at 0
  static constexpr int kValues = kKeys + Config::kStages * KTile::kBytes;
  static constexpr int kEnd = kValues + Config::kStages * VTile::kBytes;
  static constexpr int kSharedBytes = kEnd > OutTile::kBytes ? kEnd : OutTile::kBytes;

  template <class Tile>
  using Copy = tile::TileCopy<Tile, kThreads, Config::kCopyBytes, Config::kPartialDims>;

  // float32 values are split in haste where no block of keys is masked: infinite ones come out NaN.
  static constexpr bool kInHaste = sizeof(Element) == 4 && Config::kInHaste;
  template <bool kMasked>
  static constexpr tile::Values kFactors = kMasked || !Config::kInHaste ? tile::Values::kAny : tile::Values::kFinite;
  static constexpr bool kLooksAtValues = kInHaste || !Config::Mask::kUniform;

  // Queries stay in registers where they are few; elsewhere each block of keys reads them anew from shared memory.
  static constexpr int kQueryWords = kRowTiles * (Config::kHeadDim / kDepth) * 4;
  static constexpr bool kQueryInRegisters = kQueryWords <= Config::kQueryRegisters;
};

// Which block of queries of which head. Rows that see more keys than others go first.
template <class Config, class Params>
CUFLASH_DEVICE BlockPosition forward_position(const Params& params, uint32_t block_index) {
  if constexpr (Config::Mask::kGrows) {
    constexpr int kDims = Config::kHeadDim + Config::kHeadDimV;
    const int batch_heads = params.batch * params.num_q_heads;
    const int section = heads_per_section<kDims * static_cast<int>(sizeof(typename Config::Element))>(
        params.seqlen_k, params.num_q_heads / params.num_kv_heads, batch_heads);
    return position_longest_first(block_index, params.num_q_blocks, params.num_q_heads, batch_heads, section);
  } else {
    return position_by_head(block_index, params.num_q_blocks, params.num_q_heads);
  }
}

// The unit in which probabilities take these scores: where a base is coarse they are scaled, and rounded as it is,
// here.
template <class Scores, class Softmax>
CUFLASH_DEVICE float settle_unit(Scores& scores, const Softmax& softmax, float unit) {
  if (!ptx::vote_any(softmax.has_coarse_base())) return unit;
  scores.for_each([&](float& value, int, int, int) { value = tile::rounded_product(value, unit); });
  return 1.0f;
}

}  // namespace cuflash
