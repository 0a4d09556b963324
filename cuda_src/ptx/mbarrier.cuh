// sm_90: barriers in shared memory (8 bytes each) that count arriving threads and bytes of bulk copies.
// A phase completes when all arrivals and all expected bytes are in; waiting names the parity of the awaited phase,
// so a fresh barrier lets a wait for parity 1 pass at once.
#pragma once
#include "ptx/platform.cuh"

namespace cuflash::ptx {

CUFLASH_DEVICE void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the initialisation visible to bulk copies; other threads need a block barrier after it.
CUFLASH_DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

CUFLASH_DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// bytes: whole boxes, also where a box hangs over the edge of its tensor.
CUFLASH_DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

CUFLASH_DEVICE bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done != 0;
}

// The loop is part of the text: try_wait sleeps, and no register carries its answer. Braces keep the labels local.
CUFLASH_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n}" ::"r"(barrier), "r"(parity) : "memory");
}

}  // namespace cuflash::ptx
