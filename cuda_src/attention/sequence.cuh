// Which rows of which head a block works on, and where an axis begins in memory.
#pragma once
#include "attention/params.cuh"
#include "tile/arithmetic.cuh"

namespace cuflash {

struct BlockPosition {
  int row_block;  // of queries, or of keys in a kernel that walks over queries
  int head;       // query head
  int batch;
};

// Bytes of keys and values that the blocks in flight may share: large enough to fill a GPU with heads, small enough for
// the second-level cache of a data-centre card (50 MB on an H100); cards with less lose some reuse, not correctness.
inline constexpr int kSectionBytes = 32 << 20;

// The linear block index, one head after the other: neighbours share keys and values.
CUFLASH_DEVICE BlockPosition position_by_head(uint32_t index, int num_row_blocks, int num_heads) {
  const uint32_t batch_head = index / num_row_blocks;
  return {static_cast<int>(index % num_row_blocks), static_cast<int>(batch_head % num_heads),
          static_cast<int>(batch_head / num_heads)};
}

// Rows with most keys first, so that no long block starts when the others are done. All heads at once would fetch keys
// and values once a row block from memory when they do not fit the cache; therefore heads are taken in sections.
CUFLASH_DEVICE BlockPosition position_longest_first(uint32_t index, int num_row_blocks, int num_heads, int batch_heads,
                                                    int heads_per_section) {
  const uint32_t section_blocks = static_cast<uint32_t>(heads_per_section) * num_row_blocks;
  const uint32_t section = index / section_blocks;
  const uint32_t in_section = index % section_blocks;
  const uint32_t first_head = section * heads_per_section;
  const uint32_t heads = tile::smaller(heads_per_section, batch_heads - static_cast<int>(first_head));
  const uint32_t batch_head = first_head + in_section % heads;
  return {num_row_blocks - 1 - static_cast<int>(in_section / heads), static_cast<int>(batch_head % num_heads),
          static_cast<int>(batch_head / num_heads)};
}

// Query heads whose keys and values fit a section: whole groups of query heads that share a key head.
template <int kBytesPerKey>
CUFLASH_DEVICE int heads_per_section(int seqlen_k, int group, int batch_heads) {
  const int kv_heads = tile::larger(kSectionBytes / kBytesPerKey / tile::larger(seqlen_k, 1), 1);
  return kv_heads < batch_heads / group ? kv_heads * group : batch_heads;
}

// First element of one head of one batch; the pointer's type sets the unit.
template <class Element>
CUFLASH_DEVICE const Element* head_of(const void* array, const Strides& strides, int batch, int head) {
  return static_cast<const Element*>(array) + batch * strides.batch + head * strides.head;
}
template <class Element>
CUFLASH_DEVICE Element* head_of(void* array, const Strides& strides, int batch, int head) {
  return static_cast<Element*>(array) + batch * strides.batch + head * strides.head;
}

}  // namespace cuflash
