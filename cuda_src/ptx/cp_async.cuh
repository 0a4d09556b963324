// Asynchronous copies from global to shared memory, waited for by the thread that issued them.
#pragma once
#include "ptx/platform.cuh"

namespace cuflash::ptx {

// Copies the first valid_bytes of src and fills the rest of the Bytes with zeros; src is not read when valid_bytes is
// 0. Both addresses are multiples of Bytes. 16 bytes bypass L1 and fetch their 128-byte line into L2.
template <int Bytes>
CUFLASH_DEVICE void cp_async(uint32_t dst, const void* src, int valid_bytes) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async moves 4, 8 or 16 bytes");
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(dst), "l"(src), "r"(valid_bytes), "n"(Bytes)
                 : "memory");
  }
}

CUFLASH_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most Groups of this thread's committed groups are in flight. Other threads need a barrier after it.
template <int Groups>
CUFLASH_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Groups) : "memory");
}

}  // namespace cuflash::ptx
