// One tile of queries as one thread sees it: its rows, the keys they may see, the blocks its warpgroup visits; and what
// is done to a block of scores before the softmax, and to the outputs after it.
#pragma once
#include "kernels/forward_sm90_tiles.cuh"
#include "tile/arithmetic.cuh"
#include "tile/warpgroup_fragment.cuh"

namespace cuflash {

template <class Config>
struct ForwardSm90View {
  using F = ForwardSm90<Config>;
  using Element = typename F::Element;
  using Mask = typename F::Mask;
  using Score = typename F::Score;

  const typename F::Params& params;
  WorkItem work;
  int rows[2];        // of the tile's head, may lie past its end
  int keys_end;       // where the keys of the tile's share end
  BlockRange tile;    // blocks that the producer sends
  BlockRange mine;    // blocks that hold a key for this warpgroup's rows
  Range clear;        // keys that every row of the warpgroup sees

  CUFLASH_DEVICE ForwardSm90View(const typename F::Params& params, const WorkItem& work, int warpgroup)
      : params(params), work(work), keys_end(params.seqlen_k), tile(F::blocks_of_tile(params, work)) {
    const int first = work.q_block * F::kBlockQ + warpgroup * tile::kWarpgroupRows;
    rows[0] = work.q_block * F::kBlockQ + warpgroup * tile::kWarpgroupRows + tile::fragment_row();
    rows[1] = rows[0] + 8;
    mine = tile;
    if constexpr (Config::kSkipBlocks) {
      const BlockRange own = F::blocks_of_rows(params, first, first + tile::kWarpgroupRows - 1);
      mine.begin = ptx::min(ptx::max(own.begin, tile.begin), tile.end - 1);
      mine.end = ptx::max(ptx::min(own.end, tile.end), mine.begin + 1);
    }
    if constexpr (Config::kSplitsKeys) keys_end = F::share_of_tile(params, work).end * F::kBlockK;
    clear = Mask::full_key_range(params.mask, F::position_of(params, first),
                                 F::position_of(params, first + tile::kWarpgroupRows - 1), params.seqlen_k);
    clear.end = ptx::min(clear.end, keys_end);
  }

  // Whether a block needs masks and an exact maximum. The block that holds the last clear key counts as one: after it
  // every row of the warpgroup has seen a key and has a base to go on with.
  CUFLASH_DEVICE bool is_boundary(int block) const {
    const int first_key = block * F::kBlockK;
    return first_key < clear.begin || first_key + F::kBlockK >= clear.end || clear.is_empty();
  }

  // Rows past the end see what the last row sees, so that they too always have a base.
  CUFLASH_DEVICE Range visible_keys(int i) const {
    const int position = F::position_of(params, rows[i]);
    Range keys = Mask::key_range(params.mask, position, position, params.seqlen_k);
    keys.end = ptx::min(keys.end, keys_end);
    return keys;
  }

  // dot products become scores.
  template <int kCount>
  CUFLASH_DEVICE void apply_score(float (&scores)[kCount], int block) const {
    if constexpr (Score::kPreScale) {
      const typename Score::Head head = Score::head(params.score, work.head, work.batch);  // packed: none depends on it
      const int positions[2] = {F::position_of(params, rows[0]), F::position_of(params, rows[1])};
      const int first_key = block * F::kBlockK + tile::fragment_col();
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float scaled = scores[i] * params.pre_scale;
        scores[i] = Score::apply(head, scaled, positions[tile::row_of(i)], first_key + tile::col_of(i));
      }
    }
  }

  // Selected, not added: whatever stands in a hidden score, it becomes -inf.
  template <int kCount>
  CUFLASH_DEVICE void mask_scores(float (&scores)[kCount], int block) const {
    const int first_key = block * F::kBlockK + tile::fragment_col();
    int begin[2], end[2];  // columns of the fragment, counted from the thread's first
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Range keys = visible_keys(i);
      begin[i] = keys.begin - first_key;
      end[i] = keys.end - first_key;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = tile::row_of(i), col = tile::col_of(i);
      bool hidden = col >= end[row];
      if constexpr (Mask::kHasLowerEdge) hidden |= col < begin[row];
      scores[i] = hidden ? -ptx::kInfinity : scores[i];
    }
  }

  // Divides by the row sums and writes outputs and lse, unless the tile is in doubt and must be certain. Returns
  // whether this warp is in doubt: an output that is not finite may be an overflow, or a NaN that belongs to a hidden
  // key; and where a base of billions was rounded, even the largest P may have vanished.
  template <bool kMustWrite, int kCount>
  CUFLASH_DEVICE bool finish(float (&out)[kCount], const float (&base)[2], const float (&thread_sum)[2],
                             bool is_lost, uint32_t way_out_smem) const {
    const float sum[2] = {tile::quad_sum(thread_sum[0]), tile::quad_sum(thread_sum[1])};
    const bool is_inside[2] = {rows[0] < params.tile_rows, rows[1] < params.tile_rows};
    // A row without keys has sum 0; its outputs are 0 already. A sum of NaN stays one.
    const float inverse[2] = {sum[0] == 0.0f ? 0.0f : ptx::rcp(sum[0]), sum[1] == 0.0f ? 0.0f : ptx::rcp(sum[1])};
    tile::scale_rows(out, inverse);
    if constexpr (!kMustWrite) {
      float zero[2] = {0.0f, 0.0f};  // stays 0 as long as every term is finite
#pragma unroll
      for (int i = 0; i < kCount; ++i) zero[tile::row_of(i)] = ptx::fma(out[i], 0.0f, zero[tile::row_of(i)]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        is_lost |= is_inside[i] && (zero[i] != 0.0f || (sum[i] == 0.0f && base[i] != -ptx::kInfinity));
      }
      if (ptx::vote_any(is_lost)) return true;
    }
    write_lse(0, base[0], sum[0], is_inside[0]);
    write_lse(1, base[1], sum[1], is_inside[1]);
    if constexpr (F::kOutSlabs > 0 && !kMustWrite) {
      send<0>(out, way_out_smem);
    } else {
      write_row<0>(out, is_inside[0]);
      write_row<1>(out, is_inside[1]);
    }
    return false;
  }

 private:
  CUFLASH_DEVICE int q_head_of(int i) const {
    return Config::kPacksHeads ? work.head * params.group + rows[i] % params.group : work.head;
  }

  CUFLASH_DEVICE void write_lse(int i, float base, float sum, bool is_inside) const {
    // One rounding: a base of millions leaves no digits for a second.
    const float lse = sum == 0.0f ? -ptx::kInfinity : ptx::fma(base, kLn2, ptx::lg2(sum) * kLn2);
    const int64_t head = static_cast<int64_t>(work.batch) * params.num_q_heads + q_head_of(i);
    const int64_t row = head * params.seqlen_q + F::position_of(params, rows[i]);
    const int64_t lse_row = Config::kSplitsKeys ? work.split * params.split_rows + row : row;
    if (is_inside && tile::fragment_col() == 0) ptx::store_global(params.lse + lse_row, lse);
  }

  // The warp's rows by the copy engine, as many slabs at a time as its way out holds, from column kFirst on.
  template <int kFirst, int kCount>
  CUFLASH_DEVICE void send(const float (&out)[kCount], uint32_t way_out_smem) const {
    constexpr int kRoom = F::kOutSlabs * tile::kSlabCols, kLeft = F::kHeadDimV - kFirst;
    constexpr int kCols = kRoom < kLeft ? kRoom : kLeft;
    if (ptx::lane_index() == 0) ptx::bulk_wait_read<0>();  // what was there before has been read
    ptx::sync_warp();
    tile::store_to_tensor<Element, tile::kStoreRows, kCols, kFirst>(out, 1.0f, way_out_smem, 0, &params.out_map,
                                                                    rows[0] - ptx::lane_index() / 4, work.head,
                                                                    work.batch);
    if constexpr (kFirst + kCols < F::kHeadDimV) send<kFirst + kCols>(out, way_out_smem);
  }

  template <int kHalf, int kCount>
  CUFLASH_DEVICE void write_row(const float (&out)[kCount], bool is_inside) const {
    const int position = F::position_of(params, rows[kHalf]);
    const int q_head = q_head_of(kHalf);
    const int64_t offset = work.batch * params.out_strides.batch + q_head * params.out_strides.head +
                           position * params.out_strides.row;
    if constexpr (Config::kSplitsKeys) {
      float* part_gmem = static_cast<float*>(params.out) + work.split * params.split_rows * params.head_dim_v + offset;
      tile::store_float_row<kHalf>(out, part_gmem, params.head_dim_v, is_inside);
    } else if constexpr (Config::kStoresPieces) {
      tile::store_row<Element, kHalf>(out, static_cast<Element*>(params.out) + offset, params.head_dim_v, is_inside);
    } else {
      tile::store_row_elements<Element, kHalf>(out, static_cast<Element*>(params.out) + offset, params.out_strides.dim,
                                               params.head_dim_v, is_inside);
    }
  }
};

}  // namespace cuflash
