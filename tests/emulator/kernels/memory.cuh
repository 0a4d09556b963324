// One kernel for each primitive that moves data through shared and global memory.
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

using namespace cuflash;

// Fills shared memory with in[0], n[0] bytes, a multiple of 16.
CUFLASH_DEVICE void fill_shared(const TestParams& params) {
  for (uint32_t i = ptx::thread_index() * 16; i < params.n[0]; i += ptx::thread_count() * 16) {
    ptx::store_shared(ptx::dynamic_shared() + i, ptx::load_global<u32x4>(params.in[0] + i));
  }
  ptx::sync_cta();
}

// in[1]: the offset each lane passes; out: its registers.
template <int kTiles, bool kTransposed>
CUFLASH_DEVICE void load_matrix(const TestParams& params) {
  fill_shared(params);
  const uint32_t lane = ptx::lane_index();
  const uint32_t address = ptx::dynamic_shared() + ptx::load_global<uint32_t>(params.in[1] + 4 * lane);
  uint32_t r[kTiles];
  if constexpr (kTiles == 4) {
    if constexpr (kTransposed) ptx::ldmatrix_x4_trans(r, address);
    else ptx::ldmatrix_x4(r, address);
  } else {
    if constexpr (kTransposed) ptx::ldmatrix_x2_trans(r, address);
    else ptx::ldmatrix_x2(r, address);
  }
  for (int i = 0; i < kTiles; ++i) ptx::store_global(params.out + (lane * kTiles + i) * 4, r[i]);
}

// in[1]: the offset each lane passes, in[2]: its registers; out: shared memory afterwards.
template <bool kTransposed>
CUFLASH_DEVICE void store_matrix(const TestParams& params) {
  fill_shared(params);
  const uint32_t lane = ptx::lane_index();
  const u32x4 v = ptx::load_global<u32x4>(params.in[2] + 16 * lane);
  const uint32_t r[4] = {v.x, v.y, v.z, v.w};
  const uint32_t address = ptx::dynamic_shared() + ptx::load_global<uint32_t>(params.in[1] + 4 * lane);
  if constexpr (kTransposed) ptx::stmatrix_x4_trans(address, r);
  else ptx::stmatrix_x4(address, r);
  ptx::sync_cta();
  for (uint32_t i = lane * 16; i < params.n[0]; i += 512) {
    ptx::store_global(params.out + i, ptx::load_shared<u32x4>(ptx::dynamic_shared() + i));
  }
}

// Each thread copies kBytes from in[0] with in[1][thread] valid bytes; out: what arrived.
template <int kBytes>
CUFLASH_DEVICE void copy_async(const TestParams& params) {
  const uint32_t t = ptx::thread_index(), place = ptx::dynamic_shared() + t * kBytes;
  const int valid = ptx::load_global<int32_t>(params.in[1] + 4 * t);
  ptx::cp_async<kBytes>(place, valid == 0 ? nullptr : params.in[0] + t * kBytes, valid);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  for (int i = 0; i < kBytes; i += 4) {
    ptx::store_global(params.out + t * kBytes + i, ptx::load_shared<uint32_t>(place + i));
  }
}

// Three groups in flight, used in order while the later ones are still on their way.
CUFLASH_DEVICE void copy_async_groups(const TestParams& params) {
  const uint32_t t = ptx::thread_index(), stride = ptx::thread_count() * 16;
  for (int group = 0; group < 3; ++group) {
    const uint32_t offset = group * stride + t * 16;
    ptx::cp_async<16>(ptx::dynamic_shared() + offset, params.in[0] + offset, 16);
    ptx::cp_async_commit();
  }
  for (int group = 0; group < 3; ++group) {
    if (group == 0) ptx::cp_async_wait<2>();
    if (group == 1) ptx::cp_async_wait<1>();
    if (group == 2) ptx::cp_async_wait<0>();
    const uint32_t offset = group * stride + t * 16;
    ptx::store_global(params.out + offset, ptx::load_shared<u32x4>(ptx::dynamic_shared() + offset));
  }
}

// A round trip of T through global and shared memory.
template <class T>
CUFLASH_DEVICE void round_trip(const TestParams& params) {
  const uint32_t offset = ptx::thread_index() * sizeof(T), place = ptx::dynamic_shared() + offset;
  ptx::store_shared(place, ptx::load_global<T>(params.in[0] + offset));
  ptx::sync_warp();
  ptx::store_global(params.out + offset, ptx::load_shared<T>(place));
}

// Every thread adds in[0] into out[0:4] by kWidth lanes at a time, and counts itself in the int at out[16].
template <int kWidth>
CUFLASH_DEVICE void reduce(const TestParams& params) {
  const float x = ptx::load_global<float>(params.in[0] + 4 * ptx::thread_index());
  float* sums = reinterpret_cast<float*>(params.out);
  if constexpr (kWidth == 1) ptx::red_add(sums, x);
  if constexpr (kWidth == 2) ptx::red_add_v2(sums, f32x2{x, 2 * x});
  if constexpr (kWidth == 4) ptx::red_add_v4(sums, f32x4{x, 2 * x, 3 * x, 4 * x});
  const int32_t before = ptx::atomic_add(reinterpret_cast<int32_t*>(params.out + 16), 1);
  ptx::threadfence();
  if (before == 0) ptx::atomic_add(reinterpret_cast<uint32_t*>(params.out + 20), 7u);
}

// Blocks that draw tickets from out[1] and change out[2] one after the other, as out[0] counts.
CUFLASH_DEVICE void relay(const TestParams& params) {
  uint32_t* out = reinterpret_cast<uint32_t*>(params.out);
  if (ptx::thread_index() != 0) return;
  const uint32_t ticket = ptx::atomic_add(out + 1, 1u);
  while (ptx::load_acquire(out) != ticket) {
  }
  ptx::store_global(out + 2, 3 * ptx::load_global<uint32_t>(out + 2) + ticket);  // no order but this gives this sum
  ptx::store_release(out, ticket + 1);
}

// Reverses in[0] across the block, twice through the same memory; sync_cta_or says whether any value is n[1].
CUFLASH_DEVICE void reverse(const TestParams& params) {
  const uint32_t t = ptx::thread_index(), last = ptx::thread_count() - 1, base = ptx::dynamic_shared();
  const uint32_t x = ptx::load_global<uint32_t>(params.in[0] + 4 * t);
  ptx::store_shared(base + 4 * t, x);
  const bool found = ptx::sync_cta_or(x == params.n[1]);
  const uint32_t y = ptx::load_shared<uint32_t>(base + 4 * (last - t));
  const bool never = ptx::sync_cta_or(false);
  ptx::store_shared(base + 4 * t, y + (never ? 1 : 0));
  ptx::sync_cta();
  ptx::store_global(params.out + 8 * t, u32x2{ptx::load_shared<uint32_t>(base + 4 * (last - t)), found});
}

// Half the block hands values to the other half through named barriers, n[0] rounds over two slots.
CUFLASH_DEVICE void hand_over(const TestParams& params) {
  const uint32_t t = ptx::thread_index(), half = ptx::thread_count() / 2, base = ptx::dynamic_shared();
  const int all = static_cast<int>(ptx::thread_count());
  for (int round = 0; round < params.n[0]; ++round) {
    const int slot = round % 2;
    const uint32_t place = base + (slot * half + t % half) * 4;
    if (t < half) {
      if (round >= 2) ptx::named_barrier_sync(3 + slot, all);  // the slot has been read
      ptx::store_shared(place, ptx::load_global<uint32_t>(params.in[0] + (round * half + t) * 4));
      ptx::named_barrier_arrive(1 + slot, all);
    } else {
      ptx::named_barrier_sync(1 + slot, all);  // the slot has been written
      ptx::store_global(params.out + (round * half + t - half) * 4, ptx::load_shared<uint32_t>(place));
      if (round + 2 < params.n[0]) ptx::named_barrier_arrive(3 + slot, all);
    }
  }
}
