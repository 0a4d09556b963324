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
  typename F::QRing::Position q_at;
  typename F::KRing::Position k_at;
  typename F::VRing::Position v_at;
  typename F::Board::Position post_at, judged_at;
  int pending = 0;  // tiles posted and not yet judged

  CUFLASH_DEVICE void run() {
    ptx::prefetch_tensor_map(&params.q_map);
    ptx::prefetch_tensor_map(&params.k_map);
    ptx::prefetch_tensor_map(&params.v_map);
    int tile = ptx::block_index();
    // A refused tile goes out again at once, before new ones, so the board always has room for it: the slot of the
    // tile just judged.
    while (tile < params.num_tiles || pending > 0) {
      if (pending == F::Board::kSlots || tile >= params.num_tiles) {
        WorkItem work = shared.board.recall(judged_at);
        const bool refused = shared.board.was_refused(judged_at);
        judged_at.advance();
        --pending;
        work.kind = kWorkRedo;
        if (refused) serve(work);
      } else {
        serve(work_of_tile(params, tile));
        tile = next_tile<Config::kSchedule>(params, tile);
      }
    }
    shared.board.post(post_at, {0, 0, 0, kWorkEnd});
  }

  CUFLASH_DEVICE void serve(WorkItem work) {
    shared.board.post(post_at, work);
    post_at.advance();
    ++pending;
    const BlockRange blocks = F::blocks_of_tile(params, work.q_block);
    const int kv_head = work.q_head / (params.num_q_heads / params.num_kv_heads);
    for (int block = blocks.end - 1; block >= blocks.begin; --block) {
      load<typename F::KTile>(shared.k, k_at, params.k_map, block * F::kBlockK, kv_head, work.batch);
      if (block == blocks.end - 1) {
        load<typename F::QTile>(shared.q, q_at, params.q_map, work.q_block * F::kBlockQ, work.q_head, work.batch);
      }
      load<typename F::VTile>(shared.v, v_at, params.v_map, block * F::kBlockK, kv_head, work.batch);
    }
  }

  // Rows past the end of the sequence and columns past the head dimension arrive as zeros and count as bytes.
  template <class Tile, class Ring>
  CUFLASH_DEVICE static void load(const Ring& ring, typename Ring::Position& at, const tile::TensorMap& map, int row,
                                  int head, int batch) {
    ring.wait_empty(at);
    ring.expect(at);
#pragma unroll
    for (int slab = 0; slab < Tile::kSlabs; ++slab) {
      const uint32_t slab_smem = ring.stage(at) + slab * Tile::kSlabBytes;
      ptx::tma_load_4d(slab_smem, &map, ring.full(at), slab * tile::kSlabCols, row, head, batch);
    }
    at.advance();
  }
};

}  // namespace cuflash
