// The producer of the sm_90 forward kernel: one thread that takes tiles from the schedule, posts them to the consumers
// and keeps the rings of queries, keys and values filled. It runs ahead of the consumers by as much as the rings hold,
// across the border between two tiles.
#pragma once
#include "kernels/forward_sm90_tiles.cuh"
#include "ptx/tma.cuh"

namespace cuflash {

template <class Config>
struct ForwardSm90Producer {
  using F = ForwardSm90<Config>;
  const typename F::Params& params;
  typename F::Shared shared;
  typename F::KRing::Position kv_at;  // a block's keys and values have the same place in their rings
  uint32_t posted = 0, judged = 0;    // numbers of the next tile to post and of the oldest without a judgement
  int tile;                           // the next of the order; num_tiles or more when there is none

  CUFLASH_DEVICE ForwardSm90Producer(const typename F::Params& params, const typename F::Shared& shared)
      : params(params), shared(shared), tile(ptx::block_index()) {}

  CUFLASH_DEVICE void run() {
    ptx::prefetch_tensor_map(&params.q_map);
    ptx::prefetch_tensor_map(&params.k_map);
    ptx::prefetch_tensor_map(&params.v_map);
    post(work_of_tile(params, tile));
    for (bool has_next = true; has_next;) {
      has_next = serve(shared.board.recall(posted - 1));
      while (!has_next && judged < posted) has_next = judge_oldest();  // some may still come back
    }
    post({0, 0, 0, kWorkEnd, 0});
  }

  CUFLASH_DEVICE void post(const WorkItem& work) { shared.board.post(posted++, work); }

  // Loads the blocks of a tile, the last one posted. What comes after it is found out between the loads: the rings are
  // full then, and the thread would only wait. Returns whether something does.
  CUFLASH_DEVICE bool serve(const WorkItem& work) {
    const BlockRange blocks = F::blocks_of_tile(params, work);
    const int kv_head = Config::kPacksHeads ? work.head : work.head / params.group;
    uint32_t ticket = 0;
    bool has_next = false;
    for (int block = blocks.end - 1; block >= blocks.begin; --block) {
      load<typename F::KTile>(shared.k, kv_at, params.k_map, block * F::kBlockK, kv_head, work.batch);
      if (block == blocks.end - 1) {
        load_queries(work);
        if (work.kind == kWorkTile) ticket = draw_ticket<Config::kSchedule>(params);
      }
      load<typename F::VTile>(shared.v, kv_at, params.v_map, block * F::kBlockK, kv_head, work.batch);
      kv_at.advance();
      if (block == ptx::max(blocks.end - 2, blocks.begin)) has_next = look_ahead(work.kind, ticket);
    }
    return has_next;
  }

  // A refused tile goes out again before new ones, so the board always has room for it: the slot of the tile just
  // judged.
  CUFLASH_DEVICE bool look_ahead(int kind, uint32_t ticket) {
    if (kind == kWorkTile) tile = drawn_tile<Config::kSchedule>(params, tile, ticket);
    if (posted - judged == F::Board::kSlots && judge_oldest()) return true;
    if (tile >= params.num_tiles) return false;
    post(work_of_tile(params, tile));
    return true;
  }

  // Waits for the oldest tile without a judgement; posts it again if it was refused.
  CUFLASH_DEVICE bool judge_oldest() {
    const bool is_refused = shared.board.was_refused(judged);
    if (is_refused) {
      WorkItem work = shared.board.recall(judged);
      work.kind = kWorkRedo;
      post(work);
    }
    ++judged;
    return is_refused;
  }

  // Parts in the order in which they are released.
  CUFLASH_DEVICE void load_queries(const WorkItem& work) {
#pragma unroll
    for (int part = 0; part < F::kQParts; ++part) {
      const auto at = F::queries_at(posted - 1, part);
      const int first_row = work.q_block * F::kBlockQ + part * (F::kBlockQ / F::kQParts);
      if constexpr (!Config::kPacksHeads) {
        load<typename F::QTile>(shared.q, at, params.q_map, first_row, work.head, work.batch);
      } else {
        // A box holds the heads of the group side by side for each position: its rows are packed as it is written.
        shared.q.wait_empty(at);
        shared.q.expect(at);
#pragma unroll
        for (int slab = 0; slab < F::QTile::kSlabs; ++slab) {
          ptx::tma_load_5d(shared.q.stage(at) + slab * F::QTile::kSlabBytes, &params.q_map, shared.q.full(at),
                           slab * tile::kSlabCols, 0, first_row / params.group, work.head, work.batch);
        }
      }
    }
  }

  // Rows past the end of the sequence and columns past the head dimension arrive as zeros and count as bytes.
  template <class Tile, class Ring>
  CUFLASH_DEVICE static void load(const Ring& ring, typename Ring::Position at, const tile::TensorMap& map, int row,
                                  int head, int batch) {
    ring.wait_empty(at);
    ring.expect(at);
#pragma unroll
    for (int slab = 0; slab < Tile::kSlabs; ++slab) {
      const uint32_t slab_smem = ring.stage(at) + slab * Tile::kSlabBytes;
      ptx::tma_load_4d(slab_smem, &map, ring.full(at), slab * tile::kSlabCols, row, head, batch);
    }
  }
};

}  // namespace cuflash
