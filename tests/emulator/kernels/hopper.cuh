// One kernel for each sm_90 primitive that moves data asynchronously.
#include "ptx/barrier.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/registers.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/tma.cuh"

using namespace cuflash;

// An mbarrier for one arrival, behind n[0] bytes of data rounded up to 1024.
CUFLASH_DEVICE uint32_t make_barrier(const TestParams& params) {
  const uint32_t barrier = ptx::dynamic_shared() + static_cast<uint32_t>((params.n[0] + 1023) / 1024 * 1024);
  if (ptx::thread_index() == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::mbarrier_init_fence();
  }
  ptx::sync_cta();
  return barrier;
}

CUFLASH_DEVICE void copy_out(const TestParams& params) {
  for (uint32_t i = ptx::thread_index() * 4; i < params.n[0]; i += ptx::thread_count() * 4) {
    ptx::store_global(params.out + i, ptx::load_shared<uint32_t>(ptx::dynamic_shared() + i));
  }
}

CUFLASH_DEVICE void copy_in(const TestParams& params) {
  for (uint32_t i = ptx::thread_index() * 4; i < params.n[0]; i += ptx::thread_count() * 4) {
    ptx::store_shared(ptx::dynamic_shared() + i, ptx::load_global<uint32_t>(params.in[0] + i));
  }
  ptx::fence_proxy_async();
  ptx::sync_cta();
}

// Loads the box of maps[0] at n[1:], n[6] bytes, into shared memory; out: n[0] bytes of shared memory as they lie.
template <int kRank>
CUFLASH_DEVICE void load_box(const TestParams& params) {
  const uint32_t barrier = make_barrier(params), dst = ptx::dynamic_shared();
  const ptx::TensorMap* map = &params.maps[0];
  const auto c = [&](int i) { return static_cast<int>(params.n[1 + i]); };
  if (ptx::thread_index() == 0) {
    ptx::prefetch_tensor_map(map);
    ptx::mbarrier_arrive_expect_tx(barrier, static_cast<uint32_t>(params.n[6]));
    if constexpr (kRank == 2) ptx::tma_load_2d(dst, map, barrier, c(0), c(1));
    if constexpr (kRank == 3) ptx::tma_load_3d(dst, map, barrier, c(0), c(1), c(2));
    if constexpr (kRank == 4) ptx::tma_load_4d(dst, map, barrier, c(0), c(1), c(2), c(3));
    if constexpr (kRank == 5) ptx::tma_load_5d(dst, map, barrier, c(0), c(1), c(2), c(3), c(4));
  }
  ptx::mbarrier_wait(barrier, 0);
  copy_out(params);
}

// Stores or adds n[0] bytes of in[0], as they lie in shared memory, to the box of maps[0] at n[1:].
template <int kRank, bool kReduce>
CUFLASH_DEVICE void store_box(const TestParams& params) {
  copy_in(params);
  const uint32_t src = ptx::dynamic_shared();
  const ptx::TensorMap* map = &params.maps[0];
  const auto c = [&](int i) { return static_cast<int>(params.n[1 + i]); };
  if (ptx::thread_index() != 0) return;
  if constexpr (kReduce) {
    if constexpr (kRank == 2) ptx::tma_reduce_add_2d(map, src, c(0), c(1));
    if constexpr (kRank == 3) ptx::tma_reduce_add_3d(map, src, c(0), c(1), c(2));
    if constexpr (kRank == 4) ptx::tma_reduce_add_4d(map, src, c(0), c(1), c(2), c(3));
    if constexpr (kRank == 5) ptx::tma_reduce_add_5d(map, src, c(0), c(1), c(2), c(3), c(4));
  } else {
    if constexpr (kRank == 2) ptx::tma_store_2d(map, src, c(0), c(1));
    if constexpr (kRank == 3) ptx::tma_store_3d(map, src, c(0), c(1), c(2));
    if constexpr (kRank == 4) ptx::tma_store_4d(map, src, c(0), c(1), c(2), c(3));
    if constexpr (kRank == 5) ptx::tma_store_5d(map, src, c(0), c(1), c(2), c(3), c(4));
  }
  ptx::bulk_commit();
  ptx::bulk_wait<0>();
}

// in[0] through shared memory to out, without a tensor map; then added to what is there if asked.
template <bool kReduce>
CUFLASH_DEVICE void bulk_line(const TestParams& params) {
  const uint32_t barrier = make_barrier(params), bytes = static_cast<uint32_t>(params.n[0]);
  if (ptx::thread_index() == 0) {
    ptx::mbarrier_arrive_expect_tx(barrier, bytes);
    ptx::bulk_load(ptx::dynamic_shared(), params.in[0], bytes, barrier);
  }
  ptx::mbarrier_wait(barrier, 0);
  ptx::sync_cta();
  if (ptx::thread_index() != 0) return;
  ptx::bulk_store(params.out, ptx::dynamic_shared(), bytes);
  ptx::bulk_commit();
  ptx::bulk_wait<0>();
  if constexpr (kReduce) {
    ptx::bulk_reduce_add_f32(reinterpret_cast<float*>(params.out), ptx::dynamic_shared(), bytes);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
  }
}

// Phases and parities: out[i] for i < 4 is what a test of parity i % 2 says before and after one phase.
CUFLASH_DEVICE void phases(const TestParams& params) {
  const uint32_t barrier = ptx::dynamic_shared(), t = ptx::thread_index();
  if (t == 0) {
    ptx::mbarrier_init(barrier, ptx::thread_count());
    ptx::mbarrier_init_fence();
  }
  ptx::sync_cta();
  uint32_t seen = 0;
  if (t == 0) {
    for (int parity = 0; parity < 2; ++parity) seen |= ptx::mbarrier_test(barrier, parity) << parity;
  }
  ptx::mbarrier_arrive(barrier);
  ptx::mbarrier_wait(barrier, 0);
  if (t == 0) {
    for (int parity = 0; parity < 2; ++parity) seen |= ptx::mbarrier_test(barrier, parity) << (2 + parity);
  }
  ptx::sync_cta();
  ptx::mbarrier_arrive(barrier);
  ptx::mbarrier_wait(barrier, 1);
  ptx::store_global(params.out + 4 * t, seen);
}

// Three warpgroups trade registers; one lane of each warp is elected.
CUFLASH_DEVICE void trade_registers(const TestParams& params) {
  ptx::griddepcontrol_wait();
  const uint32_t warp = ptx::warp_index();
  if (warp < 4) ptx::setmaxnreg_dec<24>();
  else ptx::setmaxnreg_inc<240>();
  const bool elected = ptx::elect_one();
  ptx::griddepcontrol_launch();
  if (elected) ptx::store_global(params.out + 4 * warp, warp + 1);
}
