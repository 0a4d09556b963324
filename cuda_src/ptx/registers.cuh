// sm_90: how warpgroups trade registers, which lane speaks for a warp, how a grid overlaps with the one before it.
#pragma once
#include "ptx/platform.cuh"

namespace cuflash::ptx {

// Executed by all warps of a warpgroup; Count is a multiple of 8 in 24 to 256. Decrease before others increase. sm_90a.
template <int Count>
CUFLASH_DEVICE void setmaxnreg_inc() {
  static_assert(Count % 8 == 0 && Count >= 24 && Count <= 256, "registers a thread: a multiple of 8 in 24 to 256");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
CUFLASH_DEVICE void setmaxnreg_dec() {
  static_assert(Count % 8 == 0 && Count >= 24 && Count <= 256, "registers a thread: a multiple of 8 in 24 to 256");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

// True in exactly one lane; the warp must be converged.
CUFLASH_DEVICE bool elect_one() {
  uint32_t elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
  return elected != 0;
}

// Waits for the grids before this one (programmatic dependent launch); nothing without that launch attribute.
CUFLASH_DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next grid start its prologue.
CUFLASH_DEVICE void griddepcontrol_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace cuflash::ptx
