// Products of one warpgroup. in[0] is shared memory as it shall lie: A, then B; the layout is the caller's business.
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

using namespace cuflash;

// n: bytes in shared memory, steps of k, descriptor of A (its address part counts from the first byte of shared
// memory), descriptor of B, and what a step adds to either. kA: 0 and 1 from shared memory, plain or transposed; 2 from
// in[1], 16 bytes a thread and step. out: thread by thread its N / 2 accumulators.
template <class T, int N, int kA, int kTransB>
CUFLASH_DEVICE void product(const TestParams& params) {
  const uint32_t t = ptx::thread_index(), base = ptx::dynamic_shared();
  for (uint32_t i = t * 16; i < params.n[0]; i += 128 * 16) {
    ptx::store_shared(base + i, ptx::load_global<u32x4>(params.in[0] + i));
  }
  ptx::fence_proxy_async();  // what these threads wrote is about to be read by wgmma
  ptx::sync_cta();
  uint64_t desc_a = static_cast<uint64_t>(params.n[2]) + base / 16;
  uint64_t desc_b = static_cast<uint64_t>(params.n[3]) + base / 16;
  float d[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) d[i] = 1.0f;
#pragma unroll 1
  for (int step = 0; step < params.n[1]; ++step) {
    u32x4 v{};
    if constexpr (kA == 2) v = ptx::load_global<u32x4>(params.in[1] + (step * 128 + t) * 16);
    const uint32_t a[4] = {v.x, v.y, v.z, v.w};
    ptx::wgmma_touch(d);
    ptx::wgmma_fence();
    if constexpr (kA == 2) ptx::wgmma_m64k16_rs<T, N, kTransB>(d, a, desc_b, step != 0);
    else ptx::wgmma_m64k16_ss<T, N, kA, kTransB>(d, desc_a, desc_b, step != 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(d);
    desc_a += static_cast<uint64_t>(params.n[4]);
    desc_b += static_cast<uint64_t>(params.n[5]);
  }
#pragma unroll
  for (int i = 0; i < N / 2; ++i) ptx::store_global(params.out + (t * (N / 2) + i) * 4, d[i]);
}
