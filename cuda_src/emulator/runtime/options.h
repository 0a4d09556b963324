// Plain structs shared with the Python side, which fills them through ctypes: keep both in step.
#pragma once
#include <cstdint>

namespace cuflash::emulator {

enum class Timing : int32_t { eager, late, random };  // when asynchronous copies happen

struct Options {
  uint64_t seed;
  int32_t random_order;  // of threads and blocks; otherwise in ascending order
  int32_t timing;
  int32_t poison;   // fill fresh memory and pending destinations with 0xFF, a NaN in every float type
  int32_t race;     // happens-before check of shared memory
  int32_t preempt;  // yield at one in this many memory accesses of an instrumented kernel; 0 never
  int32_t workers;  // operating-system threads over blocks
  double watchdog_seconds;  // 0: none
};

constexpr int kMaxDims = 6;

// A registered array: every global access must fall into one contiguous run of one of them.
struct Buffer {
  uint64_t base, bytes;  // whole extent, from the lowest to past the highest byte
  int32_t writable, dims;
  uint64_t run_bytes;                            // contiguous bytes of the innermost run
  uint64_t extents[kMaxDims], strides[kMaxDims];  // of the runs, largest stride first, in bytes
  char name[32];
};

struct Statistics {
  uint64_t blocks, switches, collectives, barriers, mma, wgmma, cp_async_bytes, bulk_bytes;
  uint64_t matrix_phases, matrix_conflicts;  // ldmatrix and stmatrix: 8-row phases, and extra ones by bank conflicts
};

}  // namespace cuflash::emulator
