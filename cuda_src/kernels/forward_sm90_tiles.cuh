// What the producer and the consumers of the sm_90 forward kernel must agree on: tile shapes, the plan of shared
// memory, and which blocks of keys belong to a tile of queries.
#pragma once
#include "attention/masks/mask.cuh"
#include "attention/params_sm90.cuh"
#include "kernels/schedule_sm90.cuh"
#include "tile/pipeline.cuh"
#include "tile/tensor_store.cuh"
#include "tile/warpgroup_gemm.cuh"

namespace cuflash {

// How the base of the exponentials is chosen; see forward_sm90_softmax.cuh.
enum class Base { kPlain, kOptimistic, kFixed };

// A half-open range of blocks, never empty. They are visited from the last to the first: the boundary of a causal mask
// and the tail of the keys come first.
struct BlockRange {
  int begin, end;
};

template <class Config>
struct ForwardSm90 {
  using Element = typename Config::Element;
  using Mask = typename Config::Mask;
  using Score = typename Config::Score;
  using Params = ForwardSm90Params<Mask, Score>;

  static constexpr int kBlockQ = Config::kBlockQ, kBlockK = Config::kBlockK;
  static constexpr int kHeadDim = Config::kHeadDim, kHeadDimV = Config::kHeadDimV;
  static constexpr int kWarpgroups = Config::kWarpgroups;  // consumers; one more warpgroup produces
  static constexpr int kThreads = (kWarpgroups + 1) * tile::kWarpgroupThreads;
  static_assert(kBlockQ == kWarpgroups * tile::kWarpgroupRows, "each consumer warpgroup owns 64 rows");
  static_assert(kWarpgroups >= 1 && kWarpgroups <= 4, "registers for one to four consumer warpgroups");
  static_assert(kBlockK % 16 == 0 && kBlockK <= 256, "whole products, and a box of TMA has at most 256 rows");
  static_assert(!Config::kTurns || kWarpgroups > 1, "turns need somebody to take them with");

  // Registers a thread after the split. Together they fit the pool that the launch bounds leave to the block; with one
  // consumer warpgroup every thread has as many as it can name anyway.
  static constexpr bool kSplitsRegisters = kWarpgroups > 1;
  static constexpr int kProducerRegisters = kWarpgroups <= 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kWarpgroups <= 2 ? 232 : kWarpgroups == 3 ? 160 : 112;

  // Where the next queries have no stage of their own, each warpgroup's are a part by themselves: whoever needs no more
  // of them gets the next ones at once, and waits for nobody.
  static constexpr int kQParts = Config::kQStages == 1 ? kWarpgroups : 1;
  using QTile = tile::SlabTile<kBlockQ / kQParts, kHeadDim>;
  using KTile = tile::SlabTile<kBlockK, kHeadDim>;
  using VTile = tile::SlabTile<kBlockK, kHeadDimV>;
  using QRing = tile::Ring<Config::kQStages * kQParts, QTile::kBytes>;
  using KRing = tile::Ring<Config::kStages, KTile::kBytes>;
  using VRing = tile::Ring<Config::kStages, VTile::kBytes>;
  using Board = WorkBoard<4 * kWarpgroups>;

  // Each warp's way out: so many slabs at a time of its 16 rows of outputs.
  static constexpr int kOutSlabs = Config::kOutSlabs;
  static constexpr int kOutWarpBytes = kOutSlabs * tile::kStoreRows * tile::kSlabRowBytes;

  struct Shared {
    QRing q;
    KRing k;
    VRing v;
    Board board;
  };
  static constexpr int kTileBytes = QRing::kBufferBytes + KRing::kBufferBytes + VRing::kBufferBytes +
                                    4 * kWarpgroups * kOutWarpBytes;
  static constexpr int kBarriersBytes = QRing::kBarriersBytes + KRing::kBarriersBytes + VRing::kBarriersBytes;
  static_assert(kTileBytes + Board::kBytes + kBarriersBytes == Config::kSharedBytes, "planned as it is laid out");

  // Tiles first: their sizes keep the 1024-byte alignment that the swizzle wants.
  CUFLASH_DEVICE static Shared shared() {
    const uint32_t q = ptx::dynamic_shared();
    const uint32_t k = q + QRing::kBufferBytes, v = k + KRing::kBufferBytes;
    const uint32_t board = q + kTileBytes;
    const uint32_t q_barriers = board + Board::kBytes, k_barriers = q_barriers + QRing::kBarriersBytes;
    return {{q, q_barriers}, {k, k_barriers}, {v, k_barriers + KRing::kBarriersBytes}, {board}};
  }

  // Where a part of a tile's queries lies; number: of the tile among all that this block serves.
  CUFLASH_DEVICE static typename QRing::Position queries_at(uint32_t number, int part) {
    return {number % Config::kQStages * kQParts + part, number / Config::kQStages % 2};
  }

  // The way out of a consumer warp, behind the values.
  CUFLASH_DEVICE static uint32_t way_out(const Shared& shared, int warp) {
    return shared.v.buffers + VRing::kBufferBytes + warp * kOutWarpBytes;
  }

  // Position of a row in the sequence. Packed rows run over the heads of a group first, then over positions. Rows past
  // the end count as the last one.
  CUFLASH_DEVICE static int position_of(const Params& params, int row) {
    const int inside = ptx::min(row, params.tile_rows - 1);
    return Config::kPacksHeads ? inside / params.group : inside;
  }

  // Blocks that hold the keys which rows [first, last] may see; one block when they see none.
  CUFLASH_DEVICE static BlockRange blocks_of_rows(const Params& params, int first, int last) {
    const int first_position = position_of(params, first), last_position = position_of(params, last);
    const Range keys = Mask::key_range(params.mask, first_position, last_position, params.seqlen_k);
    const int begin = ptx::max(keys.begin, 0) / kBlockK;
    return {begin, ptx::max(begin + 1, (keys.end + kBlockK - 1) / kBlockK)};
  }

  // Blocks of a tile; with split keys the part that belongs to the split, which may be empty.
  CUFLASH_DEVICE static BlockRange share_of_tile(const Params& params, const WorkItem& work) {
    const BlockRange all = blocks_of_rows(params, work.q_block * kBlockQ, work.q_block * kBlockQ + kBlockQ - 1);
    if constexpr (!Config::kSplitsKeys) return all;
    const int64_t count = all.end - all.begin;
    return {all.begin + static_cast<int>(count * work.split / params.num_splits),
            all.begin + static_cast<int>(count * (work.split + 1) / params.num_splits)};
  }
  // What is loaded: never nothing. The keys of an empty share are hidden.
  CUFLASH_DEVICE static BlockRange blocks_of_tile(const Params& params, const WorkItem& work) {
    const BlockRange share = share_of_tile(params, work);
    return {share.begin, ptx::max(share.begin + 1, share.end)};
  }
};

}  // namespace cuflash
