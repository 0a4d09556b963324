// The arithmetic of wgmma.
#pragma once
#include "emulator/runtime/wgmma.h"

namespace cuflash::emulator {

// Computes the warpgroup's products up to, not including, this number. All its threads have issued them.
void compute_products(Block& b, int warpgroup, size_t end);

// The product no longer needs its operand.
void end_reads(Block& b, const Operand& operand, int rows);

}  // namespace cuflash::emulator
