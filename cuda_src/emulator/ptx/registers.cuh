// Host twin: register trading is checked and forgotten; one grid runs after the other.
#pragma once
#include "ptx/platform.cuh"

namespace cuflash::ptx {

template <int Count>
CUFLASH_DEVICE void setmaxnreg_inc(CUFLASH_CALLER) {
  static_assert(Count % 8 == 0 && Count >= 24 && Count <= 256, "registers a thread: a multiple of 8 in 24 to 256");
  emulator::setmaxnreg(Count, true, CUFLASH_AT);
}
template <int Count>
CUFLASH_DEVICE void setmaxnreg_dec(CUFLASH_CALLER) {
  static_assert(Count % 8 == 0 && Count >= 24 && Count <= 256, "registers a thread: a multiple of 8 in 24 to 256");
  emulator::setmaxnreg(Count, false, CUFLASH_AT);
}

CUFLASH_DEVICE bool elect_one() { return emulator::thread_index() % 32 == 0; }

CUFLASH_DEVICE void griddepcontrol_wait() {}
CUFLASH_DEVICE void griddepcontrol_launch() {}

}  // namespace cuflash::ptx
