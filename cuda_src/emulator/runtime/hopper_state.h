// sm_90 part of the state: mbarriers, bulk copies in flight, products of warpgroups in flight.
#pragma once
#include <cstdint>
#include <deque>
#include <vector>

#include "emulator/runtime/interface.h"

namespace cuflash::emulator {

struct Mbarrier {
  uint32_t address = 0;
  int32_t count = 0, pending = 0;
  int64_t bytes = 0;  // expected and not yet arrived
  uint32_t phase = 0;
  uint64_t completions = 0;
  int initialiser = 0;
  bool fenced = false;  // visible to the copy engine
  int engine = 0;       // its virtual clock
  std::vector<uint32_t> waiting;  // one bit a thread
  std::vector<uint32_t> arriving_clock, completed_clock;
};

// The image behind TensorMap: the arguments of cuTensorMapEncodeTiled, packed by the Python side.
struct TensorMapImage {
  uint64_t base;
  uint32_t magic;
  uint8_t rank, element_bytes, swizzle, dtype;  // swizzle: 0, 1, 2, 3 for none, 32, 64, 128 bytes; dtype: ElementKind
  uint32_t dims[5];
  uint32_t box[5];
  uint64_t strides[4];  // bytes, of dimensions 1 and up
  uint8_t padding[40];
};
static_assert(sizeof(TensorMapImage) == 128, "a tensor map is 128 bytes");
constexpr uint32_t kTensorMapMagic = 0x50414d54;
enum class ElementKind : uint8_t { float16, bfloat16, float32 };

// A bulk copy that has been issued and not yet happened.
struct BulkCopy {
  BulkKind kind;
  const TensorMapImage* map;  // null for the one-dimensional form
  uint8_t* global;            // of the one-dimensional form
  uint32_t shared, bytes, footprint, barrier;  // footprint: bytes of shared memory that the copy spans
  int coordinates[5];
  int thread;
  uint32_t group;               // of stores
  std::vector<uint32_t> clock;  // of loads: what whoever waits for them will know
  Location at;
};

// Shared memory that a store of this thread reads until the thread has waited for its group.
struct BulkSource {
  uint32_t offset, bytes, group;
  Location at;
};

// One wgmma as its thread issued it.
struct WgmmaOp {
  float* d;
  uint32_t a[4];
  uint64_t desc_a, desc_b;
  int n;
  bool is_bfloat16, a_in_registers, accumulate, trans_a, trans_b;
  uint32_t group;
  Location at;
};

// The true values of accumulators while the registers hold poison.
struct Accumulator {
  float* registers;
  int count, pending;
  float values[128];
};

struct HopperThread {
  uint32_t proxy_fences = 1;
  uint32_t bulk_group = 0;             // groups committed so far
  std::vector<uint32_t> bulk_pending;  // stores in flight of each group
  std::vector<BulkSource> bulk_sources;
  std::vector<WgmmaOp> wgmma;  // in order of issue, without those dropped after everything had been waited for
  size_t dropped = 0, retired = 0;  // products are numbered from the thread's first
  uint32_t wgmma_group = 0;
  std::vector<Accumulator> accumulators;
  bool wgmma_fenced = false;
  int registers = 0;  // a thread, as setmaxnreg left it

  size_t issued() const { return dropped + wgmma.size(); }
  const WgmmaOp& product(size_t number) const { return wgmma[number - dropped]; }
};

// A wgmma_wait that some warps of a warpgroup have passed and others have yet to pass.
struct WarpgroupWait {
  int groups;
  Location at;
};

struct Warpgroup {
  size_t computed = 0;               // products done so far
  size_t waits[4] = {};              // of each warp, so far
  size_t first_wait = 0;             // number of behind.front()
  std::deque<WarpgroupWait> behind;  // what the slowest warp has yet to pass, as the fastest passed it
};

struct HopperBlock {
  std::vector<Mbarrier> mbarriers;
  std::vector<BulkCopy> in_flight;
  Warpgroup warpgroups[8];
  int engines = 0;
  int free_registers = 0;
};

}  // namespace cuflash::emulator
