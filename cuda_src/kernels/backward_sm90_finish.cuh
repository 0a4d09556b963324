// dq = scale * accumulator: from float32 parts in the order of the main kernel's registers to rows of elements.
#pragma once
#include "kernels/backward_sm90_roles.cuh"

namespace cuflash {

// Row and first of two neighbouring columns (or, transposed, column and first of two neighbouring rows) of a pair of
// accumulators: the fragment of a warpgroup, chunk of four registers, thread, upper or lower row.
struct FragmentPair {
  int row, col;
};
CUFLASH_DEVICE FragmentPair fragment_pair(int chunk, int thread, int half) {
  return {thread / 32 * 16 + thread % 32 / 4 + 8 * half, chunk * 8 + thread % 4 * 2};
}

// One block: one block of queries of one head, through shared memory so that both sides move 16 bytes at a time. The
// rows of the tile are 8 elements apart more than they are long: neighbouring rows start in different banks.
template <class Config>
CUFLASH_DEVICE void backward_sm90_finish(const BackwardSm90FinishParams& params) {
  using Element = typename Config::Element;
  using Layout = BackwardSm90Layout<Config>;
  constexpr int kThreads = Config::kThreads, kBlockQ = Config::kBlockQ, kCols = Layout::kDqCols;
  constexpr int kRowBytes = (kCols + 8) * 2, kPartChunks = Layout::kDqPartFloats / 512;
  const uint32_t smem = ptx::dynamic_shared();
  const int index = ptx::grid_size() - 1 - ptx::block_index();  // what was added up last is still in L2
  const int head = index % params.num_q_heads;
  const int rest = index / params.num_q_heads;
  const int block = rest % params.num_q_blocks;
  const int batch = rest / params.num_q_blocks;
  const int64_t batch_head = static_cast<int64_t>(batch) * params.num_q_heads + head;
  const float* parts_gmem = params.dq_accumulator + (batch_head * params.num_q_blocks + block) * kBlockQ * kCols;
  const float scale = params.grad_scale;
  ptx::griddepcontrol_wait();  // the sums are complete
  bool has_sums = true;
  if constexpr (Config::kOrderedDq) {  // a block that no key has had its turn at was never written
    has_sums = ptx::load_global<uint32_t>(params.dq_turns + (batch_head * params.num_q_blocks + block) * 2) != 0;
  }

#pragma unroll 4
  for (int item = ptx::thread_index(); item < kBlockQ * kCols / 4; item += kThreads) {
    const f32x4 sums = has_sums ? ptx::load_global<f32x4>(parts_gmem + item * 4) : f32x4{0.0f, 0.0f, 0.0f, 0.0f};
    const int thread = item % 128, chunk = item / 128 % kPartChunks, part = item / 128 / kPartChunks;
    const uint32_t pairs[2] = {ptx::pack2<Element>(sums.x * scale, sums.y * scale),
                               ptx::pack2<Element>(sums.z * scale, sums.w * scale)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const FragmentPair at = fragment_pair(chunk, thread, half);
      if constexpr (Layout::kDqByRows || Layout::kDqByCols) {
        const int row = at.row + (Layout::kDqByRows ? 64 * part : 0);
        const int col = at.col + (Layout::kDqByRows ? 0 : Layout::kDqPartCols * part);
        ptx::store_shared(smem + row * kRowBytes + col * 2, pairs[half]);
      } else {
        const uint32_t element_smem = smem + at.col * kRowBytes + (64 * part + at.row) * 2;
        ptx::store_shared(element_smem, static_cast<uint16_t>(pairs[half]));
        ptx::store_shared(element_smem + kRowBytes, static_cast<uint16_t>(pairs[half] >> 16));
      }
    }
  }
  ptx::sync_cta();  // the tile is complete

  Element* dq_gmem = static_cast<Element*>(params.dq) + batch * params.dq_strides.batch + head * params.dq_strides.head;
  for (int item = ptx::thread_index(); item < kBlockQ * kCols / 8; item += kThreads) {
    const int row_in_block = item / (kCols / 8), col = item % (kCols / 8) * 8;
    const int row = block * kBlockQ + row_in_block;
    if (row < params.seqlen_q && col < params.head_dim) {
      ptx::store_global(dq_gmem + row * params.dq_strides.row + col,
                        ptx::load_shared<u32x4>(smem + row_in_block * kRowBytes + col * 2));
    }
  }
}

}  // namespace cuflash
