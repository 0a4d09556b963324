#include "emulator/runtime/hopper.h"
namespace cuflash::emulator { void run_bulk_copy(Block&, size_t){} void check_hopper_exit(Block&,int){} }
