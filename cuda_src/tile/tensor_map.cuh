// The name under which layers above know a TMA descriptor.
#pragma once
#include "ptx/tma.cuh"

namespace cuflash::tile {

using TensorMap = ptx::TensorMap;

}  // namespace cuflash::tile
