// One kernel for each primitive that works on registers: what each thread reads from in[], it sends through the
// primitive, and what comes back goes to out.
#include "ptx/element_types.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

using namespace cuflash;

template <class T>
CUFLASH_DEVICE T nth(const unsigned char* in, uint32_t index) {
  return ptx::load_global<T>(in + sizeof(T) * index);
}
template <class T>
CUFLASH_DEVICE void put(unsigned char* out, uint32_t index, T value) {
  ptx::store_global(out + sizeof(T) * index, value);
}

// in[0] a, in[1] b, in[2] c: registers of 32 lanes.
template <class T>
CUFLASH_DEVICE void multiply(const TestParams& params) {
  const uint32_t lane = ptx::lane_index();
  const u32x4 a4 = nth<u32x4>(params.in[0], lane);
  const u32x2 b = nth<u32x2>(params.in[1], lane);
  const f32x4 c4 = nth<f32x4>(params.in[2], lane);
  const uint32_t a[4] = {a4.x, a4.y, a4.z, a4.w};
  float c[4] = {c4.x, c4.y, c4.z, c4.w};
  if constexpr (sizeof(T) == 4) {
    ptx::mma_m16n8k8_tf32(c, a, b.x, b.y);
  } else {
    ptx::mma_m16n8k16<T>(c, a, b.x, b.y);
  }
  put(params.out, lane, f32x4{c[0], c[1], c[2], c[3]});
}

// in[0] float; out: bits of pack2(x, next), to_tf32, and unpack2 of the pair, for every x.
template <class T>
CUFLASH_DEVICE void convert(const TestParams& params) {
  const uint32_t i = ptx::block_index() * ptx::thread_count() + ptx::thread_index();
  if (i >= params.n[0]) return;
  const float x = nth<float>(params.in[0], i);
  const float next = nth<float>(params.in[0], (i + 1) % static_cast<uint32_t>(params.n[0]));
  const uint32_t pair = ptx::pack2<T>(x, next);
  float lo, hi;
  ptx::unpack2<T>(pair, lo, hi);
  const bool agrees = ptx::from_float<T>(x).bits == (pair & 0xffffu) &&
                      ptx::bit_cast<uint32_t>(ptx::to_float(ptx::from_float<T>(x))) == ptx::bit_cast<uint32_t>(lo);
  put(params.out, 2 * i, u32x2{pair, agrees ? ptx::to_tf32(x) : 0xdeadbeefu});
  put(params.out, 2 * i + 1, f32x2{lo, hi});
}

// in[0] float; out: ex2, lg2, rcp, fma(x, x, 1).
CUFLASH_DEVICE void approximate(const TestParams& params) {
  const uint32_t i = ptx::block_index() * ptx::thread_count() + ptx::thread_index();
  if (i >= params.n[0]) return;
  const float x = nth<float>(params.in[0], i);
  put(params.out, i, f32x4{ptx::ex2(x), ptx::lg2(x), ptx::rcp(x), ptx::fma(x, x, 1.0f)});
}

// in[0] float: out: max, min with the next, absolute value, and whether infinity and bit_cast are what they should be.
CUFLASH_DEVICE void compare(const TestParams& params) {
  const uint32_t i = ptx::thread_index();
  const float x = nth<float>(params.in[0], i);
  const float y = nth<float>(params.in[0], (i + 1) % ptx::thread_count());
  const float constant = ptx::max(3, 2) == 3 && ptx::min(3, 2) == 2 ? ptx::kInfinity : 0.0f;
  put(params.out, i, f32x4{ptx::max(x, y), ptx::min(x, y), ptx::abs(x), constant});
}

// in[0] uint32 a thread; out: xor by n[0], index n[1] rotated by lane, ballot of odd values, votes.
CUFLASH_DEVICE void exchange(const TestParams& params) {
  const uint32_t i = ptx::thread_index();
  const uint32_t x = nth<uint32_t>(params.in[0], i);
  const uint32_t across = ptx::shuffle_xor(x, static_cast<int>(params.n[0]));
  const float moved = ptx::shuffle_index(ptx::bit_cast<float>(x), static_cast<int>((params.n[1] + i) % 32));
  const uint32_t votes = ptx::ballot(x % 2 != 0);
  const uint32_t any = ptx::vote_any(x % 2 != 0), all = ptx::vote_all(x % 2 != 0);
  put(params.out, i, u32x4{across, ptx::bit_cast<uint32_t>(moved), votes, any * 2 + all});
}

// out: who every thread is.
CUFLASH_DEVICE void identify(const TestParams& params) {
  const uint32_t t = ptx::thread_index(), block = ptx::block_index();
  const uint32_t i = block * ptx::thread_count() + t;
  put(params.out, 2 * i, u32x4{t, ptx::thread_count(), block, ptx::grid_size()});
  put(params.out, 2 * i + 1, u32x4{ptx::lane_index(), ptx::warp_index(), ptx::dynamic_shared() % 1024, 0});
}
