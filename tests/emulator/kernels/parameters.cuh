// Every kernel of these tests takes the same parameters.
#include "ptx/types.cuh"

struct TestParams {
  cuflash::ptx::TensorMap maps[3];
  const unsigned char* in[3];
  unsigned char* out;
  cuflash::int64_t n[12];
};
