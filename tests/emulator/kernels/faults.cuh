// Small wrong kernels: each breaks one rule that the emulator must report.
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

using namespace cuflash;

CUFLASH_DEVICE void put(const TestParams& params, uint32_t value) {
  ptx::store_global(params.out + 4 * ptx::thread_index(), value);
}

// A neighbour's value is read without a barrier; a shuffle in between orders nothing.
template <bool kShuffle, bool kBarrier>
CUFLASH_DEVICE void read_neighbour(const TestParams& params) {
  const uint32_t t = ptx::thread_index(), base = ptx::dynamic_shared();
  ptx::store_shared(base + 4 * t, t);
  if constexpr (kShuffle) ptx::shuffle_xor(t, 1);
  if constexpr (kBarrier) ptx::sync_warp();
  put(params, ptx::load_shared<uint32_t>(base + 4 * (t ^ 1)));
}

CUFLASH_DEVICE void read_copy_early(const TestParams& params) {
  const uint32_t place = ptx::dynamic_shared() + 16 * ptx::thread_index();
  ptx::cp_async<16>(place, params.in[0], 16);
  ptx::cp_async_commit();
  put(params, ptx::load_shared<uint32_t>(place));
  ptx::cp_async_wait<0>();
}

CUFLASH_DEVICE void diverge(const TestParams& params) {
  const uint32_t t = ptx::thread_index();
  uint32_t x = t;
  if (t % 32 < 16) x = ptx::shuffle_xor(x, 1);
  else ptx::sync_warp();
  put(params, x);
}

CUFLASH_DEVICE void wait_on_two_barriers(const TestParams& params) {
  if (ptx::warp_index() == 0) ptx::named_barrier_sync(2, 64);
  else ptx::sync_cta();
  put(params, 0);
}

CUFLASH_DEVICE void leave_early(const TestParams& params) {
  if (ptx::thread_index() == 5) return;
  ptx::sync_cta();
  put(params, 0);
}

CUFLASH_DEVICE void overrun_shared(const TestParams& params) {
  put(params, ptx::load_shared<uint32_t>(ptx::dynamic_shared() + static_cast<uint32_t>(params.n[0]) +
                                         4 * ptx::thread_index()));
}

CUFLASH_DEVICE void misalign_shared(const TestParams& params) {
  put(params, ptx::load_shared<uint32_t>(ptx::dynamic_shared() + 2));
}

CUFLASH_DEVICE void overrun_global(const TestParams& params) {
  put(params, ptx::load_global<uint32_t>(params.in[0] + params.n[0] + 4 * ptx::thread_index()));
}

CUFLASH_DEVICE void write_input(const TestParams& params) {
  ptx::store_global(const_cast<unsigned char*>(params.in[0]), 1u);
}

// Only the instrumented build sees this one.
CUFLASH_DEVICE void overrun_pointer(const TestParams& params) {
  const auto* values = reinterpret_cast<const uint32_t*>(params.in[0]);
  put(params, values[params.n[0] / 4 + ptx::thread_index()]);
}

CUFLASH_DEVICE void spin(const TestParams& params) {
  volatile uint32_t stays = 1;
  while (stays != 0) {
  }
  put(params, stays);
}

CUFLASH_DEVICE void wait_by_warps(const TestParams& params) {
  ptx::named_barrier_sync(1, 48);
  put(params, 0);
}
