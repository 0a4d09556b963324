// Which block of backward_sm80 does what, how its warps share it, and where its tiles lie in shared memory.
#pragma once
#include "attention/masks/mask.cuh"
#include "attention/scores/score.cuh"
#include "attention/sequence.cuh"
#include "ptx/special_registers.cuh"
#include "tile/copy.cuh"
#include "tile/finite.cuh"
#include "tile/gemm.cuh"
#include "tile/reduction_tile.cuh"
#include "tile/turns.cuh"

namespace cuflash {

// How warps share dq: `rows` along its row tiles, `cols` take turns over its column tiles; what is left over idles.
struct WarpGrid {
  int rows, cols;
};

// The grid with most warps at work, and of those the one whose warps read the fewest rows and columns of operands.
// Both numbers are powers of two.
constexpr WarpGrid dq_warps(int warps, int row_tiles, int col_tiles) {
  WarpGrid best{1, 1};
  for (int rows = 1; rows <= warps && row_tiles % rows == 0; rows *= 2) {
    for (int cols = 1; cols <= warps / rows && col_tiles % cols == 0; cols *= 2) {
      const int more = rows * cols - best.rows * best.cols;
      const int reads = row_tiles / rows + col_tiles / cols;
      if (more > 0 || (more == 0 && reads < row_tiles / best.rows + col_tiles / best.cols)) best = {rows, cols};
    }
  }
  return best;
}

template <class Config>
struct BackwardLayout {
  using Element = typename Config::Element;
  static constexpr int kBlockQ = Config::kBlockQ;
  static constexpr int kBlockK = Config::kBlockK;
  static constexpr int kDepth = tile::Operand<Element>::kDepth;
  static constexpr int kThreads = Config::kWarps * 32;

  // Warps along the keys. With one warp a key, probabilities go from the accumulators of S to the operands of dV and dK
  // without leaving their registers. Where dK and dV do not fit the registers, kWarpsD warps share the same keys: each
  // makes the scores of its part of the queries, all meet in shared memory, and each owns a part of the head dims.
  static constexpr int kWarpsK = Config::kWarpsK;
  static constexpr int kWarpsD = Config::kWarps / kWarpsK;
  static constexpr bool kInRegisters = kWarpsD == 1;
  static constexpr int kRowTiles = kBlockK / kWarpsK / 16;
  static constexpr int kSharedPartQ = kBlockQ / kWarpsD < 16 ? 16 : kBlockQ / kWarpsD;
  static constexpr int kPartQ = kInRegisters ? Config::kPartQ : kSharedPartQ;  // queries whose scores a warp holds
  static constexpr int kParts = kInRegisters ? kBlockQ / kPartQ : 1;
  static constexpr int kScoreWarps = kInRegisters ? 1 : kBlockQ / kPartQ;  // the others of kWarpsD make no scores
  static_assert(kRowTiles * 16 * kWarpsK == kBlockK, "a warp owns whole tiles of 16 keys");
  static_assert(kWarpsD == 1 || kWarpsD == 2 || kWarpsD == 4, "warps take turns over columns in powers of two");
  static_assert(kPartQ % 16 == 0 && kParts * kPartQ * kScoreWarps == kBlockQ, "queries come in whole tiles");
  static_assert((kPartQ & (kPartQ - 1)) == 0, "parts start at powers of two: the swizzle stays an exclusive or");
  static_assert(Config::kHeadDim % (16 * kWarpsD) == 0 && Config::kHeadDimV % (16 * kWarpsD) == 0,
                "each warp owns as many tiles of 16 head dims");
  static_assert(Config::kStages == 1 || Config::kStages == 2, "one buffer each for q and d_out, or two");

  static constexpr WarpGrid kDqWarps = dq_warps(Config::kWarps, kBlockQ / 16, Config::kHeadDim / 16);

  using KTile = tile::SharedTile<Element, kBlockK, Config::kHeadDim>;
  using VTile = tile::SharedTile<Element, kBlockK, Config::kHeadDimV>;
  using QTile = tile::SharedTile<Element, kBlockQ, Config::kHeadDim>;
  using DOutTile = tile::SharedTile<Element, kBlockQ, Config::kHeadDimV>;
  using PairTile = tile::SharedTile<Element, kBlockK, kBlockQ>;  // probabilities or their gradients
  template <class Tile>
  using Copy = tile::TileCopy<Tile, kThreads, Config::kCopyBytes, Config::kPartialDims>;

  // Bytes from the start of shared memory. A stage holds queries, gradients of their outputs, and lse and delta.
  static constexpr int kValues = KTile::kBytes;
  static constexpr int kStage = kValues + VTile::kBytes;
  static constexpr int kDOut = QTile::kBytes;  // these three within a stage
  static constexpr int kLse = kDOut + DOutTile::kBytes;
  static constexpr int kDelta = kLse + kBlockQ * 4;
  static constexpr int kStageBytes = kDelta + kBlockQ * 4;
  static constexpr bool kNeedsDScores = !kInRegisters || Config::kAccumulateDq;
  static constexpr int kDScores = kStage + Config::kStages * kStageBytes;
  static constexpr int kProbs = kDScores + (kNeedsDScores ? PairTile::kBytes : 0);
  static constexpr int kSharedBytes = kProbs + (kInRegisters ? 0 : PairTile::kBytes);
  static_assert(kBlockQ % 16 == 0 && kStageBytes % 128 == 0, "swizzled tiles start at multiples of 128 bytes");
};

// Blocks that a section has at least: fewer do not fill a large GPU, and then its longest blocks would start last.
inline constexpr int kSectionBlocks = 256;

// Blocks of keys of one head are neighbours. Where later queries see more, the first keys are seen by most queries:
// they are taken first, head by head within sections whose queries fit the second-level cache.
template <class Config, class Params>
CUFLASH_DEVICE BlockPosition backward_position(const Params& params) {
  if constexpr (Config::Mask::kGrows) {
    constexpr int kBytes = (Config::kHeadDim + Config::kHeadDimV) * sizeof(typename Config::Element) +
                           (Config::kAccumulateDq ? Config::kHeadDim * 4 : 0);
    const int group = params.num_q_heads / params.num_kv_heads;
    const int batch_heads = params.batch * params.num_kv_heads;
    const int rows = tile::smaller(params.seqlen_q, 1 << 20) * tile::smaller(group, 1 << 10);
    const int heads = tile::larger(heads_per_section<kBytes>(rows, 1, batch_heads),
                                   tile::ceil_div(kSectionBlocks, params.num_k_blocks));
    BlockPosition position =
        position_longest_first(ptx::block_index(), params.num_k_blocks, params.num_kv_heads, batch_heads, heads);
    position.row_block = params.num_k_blocks - 1 - position.row_block;
    return position;
  } else {
    return position_by_head(ptx::block_index(), params.num_k_blocks, params.num_kv_heads);
  }
}

}  // namespace cuflash
