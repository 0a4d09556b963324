// Host twin: bulk copies between global and shared memory, run at seeded random moments.
#pragma once
#include "ptx/platform.cuh"

namespace cuflash::ptx {

CUFLASH_DEVICE void prefetch_tensor_map(const TensorMap*) {}

CUFLASH_DEVICE void tma_load_2d(uint32_t dst, const TensorMap* map, uint32_t barrier, int c0, int c1, CUFLASH_CALLER) {
  const int coordinates[] = {c0, c1};
  emulator::tma(emulator::BulkKind::load, map, dst, barrier, coordinates, 2, CUFLASH_AT);
}
CUFLASH_DEVICE void tma_load_3d(uint32_t dst, const TensorMap* map, uint32_t barrier, int c0, int c1, int c2,
                                CUFLASH_CALLER) {
  const int coordinates[] = {c0, c1, c2};
  emulator::tma(emulator::BulkKind::load, map, dst, barrier, coordinates, 3, CUFLASH_AT);
}
CUFLASH_DEVICE void tma_load_4d(uint32_t dst, const TensorMap* map, uint32_t barrier, int c0, int c1, int c2, int c3,
                                CUFLASH_CALLER) {
  const int coordinates[] = {c0, c1, c2, c3};
  emulator::tma(emulator::BulkKind::load, map, dst, barrier, coordinates, 4, CUFLASH_AT);
}
CUFLASH_DEVICE void tma_load_5d(uint32_t dst, const TensorMap* map, uint32_t barrier, int c0, int c1, int c2, int c3,
                                int c4, CUFLASH_CALLER) {
  const int coordinates[] = {c0, c1, c2, c3, c4};
  emulator::tma(emulator::BulkKind::load, map, dst, barrier, coordinates, 5, CUFLASH_AT);
}

CUFLASH_DEVICE void tma_store_2d(const TensorMap* map, uint32_t src, int c0, int c1, CUFLASH_CALLER) {
  const int coordinates[] = {c0, c1};
  emulator::tma(emulator::BulkKind::store, map, src, 0, coordinates, 2, CUFLASH_AT);
}
CUFLASH_DEVICE void tma_store_3d(const TensorMap* map, uint32_t src, int c0, int c1, int c2, CUFLASH_CALLER) {
  const int coordinates[] = {c0, c1, c2};
  emulator::tma(emulator::BulkKind::store, map, src, 0, coordinates, 3, CUFLASH_AT);
}
CUFLASH_DEVICE void tma_store_4d(const TensorMap* map, uint32_t src, int c0, int c1, int c2, int c3, CUFLASH_CALLER) {
  const int coordinates[] = {c0, c1, c2, c3};
  emulator::tma(emulator::BulkKind::store, map, src, 0, coordinates, 4, CUFLASH_AT);
}
CUFLASH_DEVICE void tma_store_5d(const TensorMap* map, uint32_t src, int c0, int c1, int c2, int c3, int c4,
                                 CUFLASH_CALLER) {
  const int coordinates[] = {c0, c1, c2, c3, c4};
  emulator::tma(emulator::BulkKind::store, map, src, 0, coordinates, 5, CUFLASH_AT);
}

CUFLASH_DEVICE void tma_reduce_add_2d(const TensorMap* map, uint32_t src, int c0, int c1, CUFLASH_CALLER) {
  const int coordinates[] = {c0, c1};
  emulator::tma(emulator::BulkKind::reduce_add, map, src, 0, coordinates, 2, CUFLASH_AT);
}
CUFLASH_DEVICE void tma_reduce_add_3d(const TensorMap* map, uint32_t src, int c0, int c1, int c2, CUFLASH_CALLER) {
  const int coordinates[] = {c0, c1, c2};
  emulator::tma(emulator::BulkKind::reduce_add, map, src, 0, coordinates, 3, CUFLASH_AT);
}
CUFLASH_DEVICE void tma_reduce_add_4d(const TensorMap* map, uint32_t src, int c0, int c1, int c2, int c3,
                                      CUFLASH_CALLER) {
  const int coordinates[] = {c0, c1, c2, c3};
  emulator::tma(emulator::BulkKind::reduce_add, map, src, 0, coordinates, 4, CUFLASH_AT);
}
CUFLASH_DEVICE void tma_reduce_add_5d(const TensorMap* map, uint32_t src, int c0, int c1, int c2, int c3, int c4,
                                      CUFLASH_CALLER) {
  const int coordinates[] = {c0, c1, c2, c3, c4};
  emulator::tma(emulator::BulkKind::reduce_add, map, src, 0, coordinates, 5, CUFLASH_AT);
}

CUFLASH_DEVICE void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t barrier, CUFLASH_CALLER) {
  emulator::bulk(emulator::BulkKind::load, src, dst, bytes, barrier, CUFLASH_AT);
}
CUFLASH_DEVICE void bulk_store(void* dst, uint32_t src, uint32_t bytes, CUFLASH_CALLER) {
  emulator::bulk(emulator::BulkKind::store, dst, src, bytes, 0, CUFLASH_AT);
}
CUFLASH_DEVICE void bulk_reduce_add_f32(float* dst, uint32_t src, uint32_t bytes, CUFLASH_CALLER) {
  emulator::bulk(emulator::BulkKind::reduce_add, dst, src, bytes, 0, CUFLASH_AT);
}

CUFLASH_DEVICE void bulk_commit() { emulator::bulk_commit(); }
template <int Groups>
CUFLASH_DEVICE void bulk_wait(CUFLASH_CALLER) {
  emulator::bulk_wait(Groups, false, CUFLASH_AT);
}
template <int Groups>
CUFLASH_DEVICE void bulk_wait_read(CUFLASH_CALLER) {
  emulator::bulk_wait(Groups, true, CUFLASH_AT);
}
CUFLASH_DEVICE void fence_proxy_async() { emulator::fence_proxy_async(); }
CUFLASH_DEVICE void fence_proxy_async_global() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

}  // namespace cuflash::ptx
