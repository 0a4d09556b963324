// Host twin: who am I.
#pragma once
#include "ptx/platform.cuh"

namespace cuflash::ptx {

CUFLASH_DEVICE uint32_t thread_index() { return emulator::thread_index(); }
CUFLASH_DEVICE uint32_t thread_count() { return emulator::thread_count(); }
CUFLASH_DEVICE uint32_t block_index() { return emulator::block_index(); }
CUFLASH_DEVICE uint32_t block_index_again() { return emulator::block_index(); }
CUFLASH_DEVICE uint32_t grid_size() { return emulator::grid_size(); }
CUFLASH_DEVICE uint32_t lane_index() { return emulator::thread_index() % 32; }
CUFLASH_DEVICE uint32_t warp_index() { return emulator::thread_index() / 32; }

}  // namespace cuflash::ptx
