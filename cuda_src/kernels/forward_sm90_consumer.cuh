// A consumer warpgroup of the sm_90 forward kernel: 64 rows of queries against the blocks of keys of a tile.
//
// Inside a warpgroup the scores of block n are computed while the probabilities of block n + 1 multiply their values,
// and the softmax of block n runs while that product is still under way. Between warpgroups, turns keep one on the
// tensor cores while another is at its exponentials.
#pragma once
#include "kernels/forward_sm90_softmax.cuh"
#include "kernels/forward_sm90_view.cuh"
#include "ptx/barrier.cuh"

namespace cuflash {

// Named barriers of the sm_90 forward kernel; 0 belongs to the whole block.
enum ForwardSm90Barrier : int { kTurnBarrier = 1, kWarpgroupBarrier = 8 };  // one a consumer warpgroup each

template <class Config>
struct ForwardSm90Consumer {
  using F = ForwardSm90<Config>;
  using Element = typename F::Element;
  using View = ForwardSm90View<Config>;
  static constexpr Base kBase = Config::kBase;
  static constexpr bool kLoopHasBoundary = !F::Mask::kUniform || kBase == Base::kPlain;

  const typename F::Params& params;
  typename F::Shared shared;
  int warpgroup;    // 0 to kWarpgroups - 1
  bool is_speaker;  // one thread of the warpgroup releases stages
  typename F::KRing::Position k_at = {};
  typename F::VRing::Position v_at = {};
  uint32_t number = 0;  // of the tile, from which the place of its queries follows

  // One tile in the form of Config::kBase. Returns whether this warp refuses its result.
  CUFLASH_DEVICE bool run_tile(const WorkItem& work) {
    const View view(params, work, warpgroup);
    RowStats rows;
    float out[F::kHeadDimV / 2];
    uint32_t probs[F::kBlockK / 4];
#pragma unroll
    for (float& value : out) value = 0.0f;
    skip_blocks(view.tile.end - view.mine.end);
    shared.q.wait_full(queries_at());
    const uint32_t q_smem = queries();
    first_block(view, q_smem, rows, probs);
#pragma unroll 1
    for (int block = view.mine.end - 2; block >= view.mine.begin; --block) {
      next_block(view, q_smem, block, rows, out, probs);
    }
    shared.v.wait_full(v_at);
    tile::start_output<Element, F::kBlockK, F::kHeadDimV>(out, probs, shared.v.stage(v_at));
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(out);
    release(shared.v, v_at);
    if constexpr (kBase == Base::kOptimistic) tile::scale_rows(out, rows.pending);
    if constexpr (F::Mask::kHasLowerEdge) skip_blocks(view.mine.begin - view.tile.begin);
    const int warp = ptx::thread_index() / 32 - 4;
    return view.template finish<false>(out, rows.base, rows.sum, rows.is_lost, F::way_out(shared, warp));
  }

  // The block visited first: nothing to overlap with yet, and its maximum is always exact.
  CUFLASH_DEVICE void first_block(const View& view, uint32_t q_smem, RowStats& rows,
                                  uint32_t (&probs)[F::kBlockK / 4]) {
    float scores[F::kBlockK / 2], block_sum[2], largest[2], rescale[2];
    const int block = view.mine.end - 1;
    shared.k.wait_full(k_at);
    tile::start_scores<Element, F::kBlockQ / F::kQParts, F::kBlockK, F::kHeadDim>(scores, q_smem, shared.k.stage(k_at));
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(scores);
    release(shared.k, k_at);
    if (is_speaker && block == view.mine.begin) shared.q.release(queries_at());
    view.apply_score(scores, block);
    if (view.is_boundary(block)) view.mask_scores(scores, block);
    raise_base(scores, params.softmax_unit, rows, rescale);
    exponentiate<false>(scores, params.softmax_unit, rows, block_sum, largest);
    rows.sum[0] = block_sum[0];
    rows.sum[1] = block_sum[1];
    tile::pack_fragment<Element>(scores, probs);
  }

  // Scores of this block and outputs of the one before it, both in flight at once.
  CUFLASH_DEVICE void next_block(const View& view, uint32_t q_smem, int block, RowStats& rows,
                                 float (&out)[F::kHeadDimV / 2], uint32_t (&probs)[F::kBlockK / 4]) {
    float scores[F::kBlockK / 2], block_sum[2], largest[2];
    shared.k.wait_full(k_at);
    take_turn();
    tile::start_scores<Element, F::kBlockQ / F::kQParts, F::kBlockK, F::kHeadDim>(scores, q_smem, shared.k.stage(k_at));
    shared.v.wait_full(v_at);
    tile::start_output<Element, F::kBlockK, F::kHeadDimV>(out, probs, shared.v.stage(v_at));
    give_turn();
    ptx::wgmma_wait<1>();  // the scores are there; the product of the block before may still run
    ptx::wgmma_touch(scores);
    release(shared.k, k_at);
    if (is_speaker && block == view.mine.begin) shared.q.release(queries_at());
    view.apply_score(scores, block);
    float rescale[2] = {rows.pending[0], rows.pending[1]};
    const bool is_exact = kLoopHasBoundary && (kBase == Base::kPlain || view.is_boundary(block) || block == view.mine.end - 2);
    if (is_exact) {
      float factor[2];
      if (view.is_boundary(block)) view.mask_scores(scores, block);
      raise_base(scores, params.softmax_unit, rows, factor);
      rescale[0] *= factor[0];
      rescale[1] *= factor[1];
    }
    exponentiate<kBase == Base::kOptimistic>(scores, params.softmax_unit, rows, block_sum, largest);
    bool moved = is_exact;
    if constexpr (kBase == Base::kFixed) moved |= keep_in_range(rows, scores, block_sum, rescale);
    ptx::wgmma_wait<0>();  // probs and the stage of values are free, the output is whole
    ptx::wgmma_touch(out);
    release(shared.v, v_at);
    if (moved || (kBase == Base::kOptimistic && ptx::vote_any(rescale[0] != 1.0f || rescale[1] != 1.0f))) {
      tile::scale_rows(out, rescale);
    }
    rows.sum[0] += block_sum[0];
    rows.sum[1] += block_sum[1];
    tile::pack_fragment<Element>(scores, probs);
    if constexpr (kBase == Base::kOptimistic) follow_base<Element>(largest, params.softmax_unit, rows);
  }

  // Fixed base: one compare and one vote a block; the rest is rare. Returns whether this warp moved a base: its outputs
  // follow by the factor once they are whole, since all warps of a warpgroup must wait for products at the same place.
  CUFLASH_DEVICE bool keep_in_range(RowStats& rows, float (&scores)[F::kBlockK / 2], float (&block_sum)[2],
                                    float (&rescale)[2]) {
    if (!ptx::vote_any(ptx::max(block_sum[0], block_sum[1]) > kMoveLimit<F::kBlockK>)) return false;
    float factor[2];
    move_base<F::kBlockK>(scores, rows, block_sum, factor);
    tile::scale_rows(scores, factor);
    rescale[0] *= factor[0];
    rescale[1] *= factor[1];
    return true;
  }

  // Blocks of the tile that hold no key for this warpgroup. One thread waits and releases for all: a warp that waits
  // for a stage without using it can fall two rounds behind the barrier, and then would wait for ever. The turn goes
  // around as often as in the other warpgroups. The others must not overtake that thread: to a warp that is a round
  // ahead of a stage's barrier, it looks full.
  CUFLASH_DEVICE void skip_blocks(int count) {
    if constexpr (Config::kSkipBlocks) {
      const bool must_meet = !Config::kTurns && count > 0;  // a turn is a meeting, too
      for (; count > 0; --count) {
        if (is_speaker) {
          shared.k.wait_full(k_at);
          shared.k.release(k_at);
          shared.v.wait_full(v_at);
          shared.v.release(v_at);
        }
        k_at.advance();
        v_at.advance();
        ptx::sync_warp();
        take_turn();
        give_turn();
      }
      if (must_meet) ptx::named_barrier_sync(kWarpgroupBarrier + warpgroup, tile::kWarpgroupThreads);
    }
  }

  CUFLASH_DEVICE typename F::QRing::Position queries_at() const {
    return F::queries_at(number, F::kQParts == 1 ? 0 : warpgroup);
  }
  // Address of this warpgroup's rows.
  CUFLASH_DEVICE uint32_t queries() const {
    return shared.q.stage(queries_at()) + (F::kQParts == 1 ? warpgroup * tile::kWarpgroupRows * tile::kSlabRowBytes : 0);
  }

  template <class Ring>
  CUFLASH_DEVICE void release(const Ring& ring, typename Ring::Position& at) {
    if (is_speaker) ring.release(at);
    at.advance();
  }

  static constexpr int kTurnThreads = 2 * tile::kWarpgroupThreads;  // who waits for the turn and who hands it over

  CUFLASH_DEVICE void take_turn() const {
    if constexpr (Config::kTurns) ptx::named_barrier_sync(kTurnBarrier + warpgroup, kTurnThreads);
  }
  CUFLASH_DEVICE void give_turn() const { give_turn_to((warpgroup + 1) % F::kWarpgroups); }
  CUFLASH_DEVICE static void give_turn_to(int other) {
    if constexpr (Config::kTurns) ptx::named_barrier_arrive(kTurnBarrier + other, kTurnThreads);
  }
};

}  // namespace cuflash
