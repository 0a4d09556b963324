// A ring of stages in shared memory between one producer thread and the consumer warpgroups. The producer waits for an
// empty stage, announces bytes and starts copies; a consumer waits for a full stage, reads it and releases it.
// Each side counts its own way around the ring: the parity of a round is the parity of the barrier's phase.
#pragma once
#include "ptx/mbarrier.cuh"

namespace cuflash::tile {

inline constexpr int kBarrierBytes = 8;

// Where a side stands: the stage in use and how often it went around, modulo two.
template <int kStages>
struct RingPosition {
  uint32_t stage = 0;
  uint32_t round = 0;

  CUFLASH_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      round ^= 1;
    }
  }
};

// kStages buffers of kStageBytes, then a full and an empty barrier for each.
template <int kStages, int kStageBytes>
struct Ring {
  using Position = RingPosition<kStages>;
  static constexpr int kBufferBytes = kStages * kStageBytes;
  static constexpr int kBarriersBytes = 2 * kStages * kBarrierBytes;

  uint32_t buffers;   // address of stage 0
  uint32_t barriers;  // address of the full barrier of stage 0; the empty ones follow the full ones

  CUFLASH_DEVICE uint32_t stage(Position at) const { return buffers + at.stage * kStageBytes; }
  CUFLASH_DEVICE uint32_t full(Position at) const { return barriers + at.stage * kBarrierBytes; }
  CUFLASH_DEVICE uint32_t empty(Position at) const { return barriers + (kStages + at.stage) * kBarrierBytes; }

  // consumers: arrivals that free a stage.
  CUFLASH_DEVICE void init(int consumers) const {
    for (Position at; at.round == 0; at.advance()) {
      ptx::mbarrier_init(full(at), 1);
      ptx::mbarrier_init(empty(at), consumers);
    }
  }

  // A fresh barrier counts as having completed the phase before the first: round 0 waits for parity 1 and passes.
  CUFLASH_DEVICE void wait_empty(Position at) const { ptx::mbarrier_wait(empty(at), at.round ^ 1); }
  CUFLASH_DEVICE void expect(Position at) const { ptx::mbarrier_arrive_expect_tx(full(at), kStageBytes); }
  CUFLASH_DEVICE void wait_full(Position at) const { ptx::mbarrier_wait(full(at), at.round); }
  CUFLASH_DEVICE void release(Position at) const { ptx::mbarrier_arrive(empty(at)); }
};

}  // namespace cuflash::tile
