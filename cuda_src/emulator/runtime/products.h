// Small dense arithmetic for the matrix instructions, written for the host's vector unit.
#pragma once
#include <cstdint>

namespace cuflash::emulator {

// count is a multiple of 8.
void widen(const uint16_t* from, float* to, int count, bool is_bfloat16);

// d[rows, n] += a[rows, depth] * b[depth, n], sums in ascending order of depth. rows is a multiple of 4 and n of 8; d and
// b are 32-byte aligned.
void multiply_add(float* d, const float* a, const float* b, int rows, int depth, int n);

}  // namespace cuflash::emulator
