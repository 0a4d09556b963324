// C = A * B^T by 64x64 tiles as Hopper does it: one warp feeds a ring of stages by TMA, a warpgroup multiplies by
// wgmma, C leaves through shared memory by TMA. maps: A [m, depth], B [n, depth], C [m, n].
// Each fault breaks one line of it.
#include "ptx/barrier.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/registers.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

using namespace cuflash;

enum class Fault {
  none,
  early_release,
  missing_fence,
  wrong_bytes,
  read_before_wait,
  wrong_stride,
  no_slot_wait,
  no_store_wait,
  lonely_wait,
  no_init_fence
};

constexpr int kStages = 2, kTileBytes = 64 * 128;
constexpr uint64_t kSwizzle128 = 1ull << 62;

CUFLASH_DEVICE uint64_t descriptor(uint32_t address, uint32_t stride) {
  return kSwizzle128 | static_cast<uint64_t>(stride / 16) << 32 | 1ull << 16 | (address & 0x3ffff) / 16;
}

struct Ring {
  uint32_t tiles, full, empty;  // shared addresses
  CUFLASH_DEVICE uint32_t a(int step) const { return tiles + step % kStages * 2 * kTileBytes; }
  CUFLASH_DEVICE uint32_t b(int step) const { return a(step) + kTileBytes; }
  CUFLASH_DEVICE uint32_t full_at(int step) const { return full + step % kStages * 8; }
  CUFLASH_DEVICE uint32_t empty_at(int step) const { return empty + step % kStages * 8; }
  CUFLASH_DEVICE uint32_t parity(int step) const { return step / kStages & 1; }
};

template <Fault kFault>
CUFLASH_DEVICE void produce(const TestParams& params, const Ring& ring, int steps, int row0, int column0) {
  for (int step = 0; step < steps; ++step) {
    if constexpr (kFault != Fault::no_slot_wait) ptx::mbarrier_wait(ring.empty_at(step), ring.parity(step) ^ 1);
    ptx::mbarrier_arrive_expect_tx(ring.full_at(step), 2 * kTileBytes + (kFault == Fault::wrong_bytes ? 16 : 0));
    ptx::tma_load_2d(ring.a(step), &params.maps[0], ring.full_at(step), step * 64, row0);
    ptx::tma_load_2d(ring.b(step), &params.maps[1], ring.full_at(step), step * 64, column0);
  }
}

template <class T, Fault kFault>
CUFLASH_DEVICE void consume(float (&d)[32], const Ring& ring, int steps) {
  constexpr uint32_t kStride = kFault == Fault::wrong_stride ? 512 : 1024;
  for (int step = 0; step < steps; ++step) {
    ptx::mbarrier_wait(ring.full_at(step), ring.parity(step));
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::wgmma_m64k16_ss<T, 64, 0, 0>(d, descriptor(ring.a(step) + k * 32, kStride),
                                        descriptor(ring.b(step) + k * 32, kStride), step + k > 0);
    }
    ptx::wgmma_commit();
    if constexpr (kFault == Fault::early_release) ptx::mbarrier_arrive(ring.empty_at(step));
    if (kFault == Fault::lonely_wait && step == 1 && ptx::warp_index() == 2) ptx::wgmma_wait<0>();
    if (kFault != Fault::read_before_wait || step + 1 < steps) ptx::wgmma_wait<0>();
    ptx::wgmma_touch(d);
    if constexpr (kFault != Fault::early_release) ptx::mbarrier_arrive(ring.empty_at(step));
  }
}

template <Fault kFault>
CUFLASH_DEVICE void write_out(const TestParams& params, float (&d)[32], uint32_t c_smem, int row0, int column0) {
  const int lane = static_cast<int>(ptx::lane_index()), warp = static_cast<int>(ptx::warp_index());
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    ptx::store_shared(c_smem + (row * 64 + column) * 4, d[i]);
  }
  if constexpr (kFault == Fault::read_before_wait) ptx::wgmma_wait<0>();
  if constexpr (kFault != Fault::missing_fence) ptx::fence_proxy_async();  // C is read by the copy engine
  ptx::named_barrier_sync(1, 128);                                        // by all of it
  if (ptx::thread_index() != 0) return;
  ptx::tma_store_2d(&params.maps[2], c_smem, column0, row0);
  ptx::bulk_commit();
  if constexpr (kFault != Fault::no_store_wait) ptx::bulk_wait_read<0>();
}

// n: m, n, depth, blocks along n.
template <class T, Fault kFault>
CUFLASH_DEVICE void gemm(const TestParams& params) {
  const uint32_t base = ptx::dynamic_shared(), warp = ptx::warp_index();
  const uint32_t c_smem = base + kStages * 2 * kTileBytes, barriers = c_smem + 64 * 64 * 4;
  const Ring ring{base, barriers, barriers + 8 * kStages};
  const int steps = static_cast<int>(params.n[2]) / 64;
  const int row0 = static_cast<int>(ptx::block_index() / params.n[3]) * 64;
  const int column0 = static_cast<int>(ptx::block_index() % params.n[3]) * 64;
  if (ptx::thread_index() == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(ring.full_at(stage), 1);
      ptx::mbarrier_init(ring.empty_at(stage), 128);
    }
    if constexpr (kFault != Fault::no_init_fence) ptx::mbarrier_init_fence();
  }
  ptx::sync_cta();
  if (warp == 4) {
    if (ptx::elect_one()) produce<kFault>(params, ring, steps, row0, column0);
    return;
  }
  float d[32] = {};
  consume<T, kFault>(d, ring, steps);
  write_out<kFault>(params, d, c_smem, row0, column0);
}
