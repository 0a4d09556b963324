// The certain form of a tile, for tiles that the quick form refused: plain online softmax with an exact maximum before
// every block, one product at a time, and hidden values that are never touched. It has no limits on its input beyond
// those of the arithmetic, and always writes.
//
// On boundary blocks the probabilities multiply the values in float registers, key by key, and a row skips the keys
// that it does not see: a matrix product would multiply their NaN or infinity by 0.
#pragma once
#include "kernels/forward_sm90_consumer.cuh"

namespace cuflash {

template <class Config>
struct ForwardSm90Redo {
  using F = ForwardSm90<Config>;
  using Element = typename F::Element;
  using View = ForwardSm90View<Config>;
  using Consumer = ForwardSm90Consumer<Config>;
  static constexpr float kHidden = -1.0f;  // stands for P of a key that the row does not see

  Consumer& consumer;
  const View view;
  const uint32_t q_smem;
  float largest[2] = {-ptx::kInfinity, -ptx::kInfinity};  // of the scores so far, not scaled
  float sum[2] = {0.0f, 0.0f};

  CUFLASH_DEVICE ForwardSm90Redo(Consumer& consumer, const WorkItem& work)
      : consumer(consumer), view(consumer.params, work, consumer.warpgroup), q_smem(consumer.queries()) {}

  CUFLASH_DEVICE void run() {
    float out[F::kHeadDimV / 2];
#pragma unroll
    for (float& value : out) value = 0.0f;
    consumer.shared.q.wait_full(consumer.queries_at());
    int block = view.tile.end - 1;
    if constexpr (F::Mask::kUniform) {
#pragma unroll 1
      for (; block >= view.tile.begin; --block) clear_block(out, block);
    } else {
      // Boundary blocks at the upper edge, clear blocks, boundary blocks at the lower edge.
#pragma unroll 1
      for (int edge = 0; edge < 2; ++edge) {
#pragma unroll 1
        for (; block >= view.tile.begin && view.is_boundary(block); --block) boundary_block(out, block);
#pragma unroll 1
        for (; block >= view.tile.begin && !view.is_boundary(block); --block) clear_block(out, block);
      }
    }
    if (consumer.is_speaker) consumer.shared.q.release(consumer.queries_at());
    const float base[2] = {largest[0] * consumer.params.softmax_unit, largest[1] * consumer.params.softmax_unit};
    if constexpr (F::kOutSlabs > 0) {
      if (ptx::lane_index() == 0) ptx::bulk_wait<0>();  // what the quick form sent has arrived, and is overwritten
      ptx::sync_warp();
    }
    view.template finish<true>(out, base, sum, false, 0);
  }

  CUFLASH_DEVICE void clear_block(float (&out)[F::kHeadDimV / 2], int block) {
    float scores[F::kBlockK / 2];
    uint32_t probs[F::kBlockK / 4];
    find_probs<false>(scores, out, block);
    tile::pack_fragment<Element>(scores, probs);
    consumer.shared.v.wait_full(consumer.v_at);
    tile::start_output<Element, F::kBlockK, F::kHeadDimV>(out, probs, consumer.shared.v.stage(consumer.v_at));
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(out);
    consumer.release(consumer.shared.v, consumer.v_at);
  }

  CUFLASH_DEVICE void boundary_block(float (&out)[F::kHeadDimV / 2], int block) {
    float scores[F::kBlockK / 2];
    uint32_t probs[F::kBlockK / 4];
    find_probs<true>(scores, out, block);
    tile::pack_fragment<Element>(scores, probs);
    consumer.shared.v.wait_full(consumer.v_at);
    add_seen_values(out, probs, consumer.shared.v.stage(consumer.v_at));
    // All four warps have read the values; only then may the stage be filled again.
    ptx::named_barrier_sync(kWarpgroupBarrier + consumer.warpgroup, tile::kWarpgroupThreads);
    consumer.release(consumer.shared.v, consumer.v_at);
  }

  // P of one block against the maximum that includes it; earlier outputs and sums follow at once.
  template <bool kMarkHidden>
  CUFLASH_DEVICE void find_probs(float (&scores)[F::kBlockK / 2], float (&out)[F::kHeadDimV / 2], int block) {
    const float unit = consumer.params.softmax_unit;
    consumer.shared.k.wait_full(consumer.k_at);
    tile::start_scores<Element, F::kBlockQ / F::kQParts, F::kBlockK, F::kHeadDim>(scores, q_smem,
                                                                     consumer.shared.k.stage(consumer.k_at));
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(scores);
    consumer.release(consumer.shared.k, consumer.k_at);
    view.apply_score(scores, block);
    view.mask_scores(scores, block);
    float block_largest[2], rescale[2];
    tile::row_max(scores, block_largest);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float grown = ptx::max(largest[i], block_largest[i]);
      rescale[i] = ptx::ex2((largest[i] - usable_base(grown)) * unit);
      largest[i] = grown;
      sum[i] *= rescale[i];
    }
    tile::scale_rows(out, rescale);
    // Subtracted before the multiplication: the largest score gives exactly 1, however large it is.
#pragma unroll
    for (int i = 0; i < F::kBlockK / 2; ++i) {
      const int row = tile::row_of(i);
      const float prob = ptx::ex2((scores[i] - usable_base(largest[row])) * unit);
      sum[row] += prob;
      scores[i] = kMarkHidden && scores[i] == -ptx::kInfinity ? kHidden : prob;
    }
  }

  // out += P * V over the keys that each row sees. The first two words of probs are always the next eight keys: after
  // them the whole fragment moves down, so registers are never indexed at run time.
  CUFLASH_DEVICE static void add_seen_values(float (&out)[F::kHeadDimV / 2], uint32_t (&probs)[F::kBlockK / 4],
                                             uint32_t v_smem) {
#pragma unroll 1
    for (int key = 0; key < F::kBlockK; ++key) {
      const int owner = ptx::lane_index() / 4 * 4 + key % 8 / 2;  // the lane of the quad that holds this column
      float prob[2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float even, odd;
        ptx::unpack2<Element>(ptx::shuffle_index(probs[row], owner), even, odd);
        prob[row] = key % 2 ? odd : even;
      }
#pragma unroll
      for (int i = 0; i < F::kHeadDimV / 2; i += 4) {
        const int col = tile::fragment_col() + tile::col_of(i);
        float lo, hi;
        ptx::unpack2<Element>(ptx::load_shared<uint32_t>(F::VTile::address(v_smem, key, col)), lo, hi);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const bool sees = prob[row] >= 0.0f;
          out[i + 2 * row] = sees ? ptx::fma(prob[row], lo, out[i + 2 * row]) : out[i + 2 * row];
          out[i + 2 * row + 1] = sees ? ptx::fma(prob[row], hi, out[i + 2 * row + 1]) : out[i + 2 * row + 1];
        }
      }
      if (key % 8 == 7) {
#pragma unroll
        for (int i = 0; i + 2 < F::kBlockK / 4; ++i) probs[i] = probs[i + 2];
      }
    }
  }
};

}  // namespace cuflash
