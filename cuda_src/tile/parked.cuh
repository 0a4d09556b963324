// Values of a thread that wait in shared memory: needed once in a while, they would hold registers all the time.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace cuflash::tile {

// One place a thread, touched by that thread alone: no barrier is needed between put and get.
template <class Value>
struct Parked {
  static constexpr int kBytes = sizeof(Value);  // a thread

  CUFLASH_DEVICE static void put(uint32_t base, const Value& value) { ptx::store_shared(address(base), value); }
  CUFLASH_DEVICE static Value get(uint32_t base) { return ptx::load_shared<Value>(address(base)); }

 private:
  // Opaque, or the address would hold a register in the value's stead.
  CUFLASH_DEVICE static uint32_t address(uint32_t base) {
    return base + static_cast<uint32_t>(ptx::opaque(static_cast<int>(ptx::thread_index())) * kBytes);
  }
};

}  // namespace cuflash::tile
