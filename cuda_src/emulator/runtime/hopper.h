// What the scheduler and the parts of the sm_90 emulation ask of each other.
#pragma once
#include <string>

#include "emulator/runtime/state.h"

namespace cuflash::emulator {

// Performs the copy at this place of the list of those in flight, and takes it off the list.
void run_bulk_copy(Block& b, size_t index);

// A thread may not leave while its own asynchronous work still uses shared memory or registers.
void check_hopper_exit(Block& b, int thread);

void reset_hopper(HopperThread& thread, uint32_t block_threads);

// What ptxas gives a thread of a kernel that trades registers: the file divided by the threads, in steps of eight.
inline int registers_at_start(uint32_t threads) {
  const uint32_t share = 65536 / threads & ~7u;
  return static_cast<int>(share < 248 ? share : 248);
}

Mbarrier& find_mbarrier(Block& b, int thread, uint32_t address, Location at);
// Bytes of a bulk copy have arrived; whoever waits for the phase knows what the clock knows.
void complete_bytes(Block& b, Mbarrier& barrier, uint32_t bytes, const std::vector<uint32_t>& clock);
// The same without the checks of a use by a thread.
Mbarrier* look_up_mbarrier(Block& b, uint32_t address);
std::string describe_mbarrier_wait(Block& b, uint32_t address, uint32_t parity, Location at);

// Swizzle patterns of tensor maps and descriptors: 0, 1, 2, 3 for none, 32, 64 and 128 bytes. The 16-byte chunk of an
// address within its span is exchanged by the bits above 128 bytes, so the pattern repeats every 8 lines of 128 bytes.
//
// Rows of a swizzled box are one span apart, also where the box is narrower (seen on an H200).
inline uint32_t row_pitch(const TensorMapImage& map) {
  return map.swizzle == 0 ? map.box[0] * map.element_bytes : 16u << map.swizzle;
}
inline uint32_t swizzled(uint32_t address, int mode) { return address ^ (address >> 7 & ((1u << mode) - 1)) << 4; }

}  // namespace cuflash::emulator
