// Everything the emulator knows about one running block: its threads (fibers), warps, barriers, memory and clocks.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "emulator/runtime/context_switch.h"
#include "emulator/runtime/hopper_state.h"
#include "emulator/runtime/interface.h"
#include "emulator/runtime/options.h"
#include "emulator/runtime/race.h"

namespace cuflash::emulator {

enum class Wait : uint8_t { nothing, warp, barrier, mbarrier, bulk_group, warpgroup, exited };
enum class Access : uint8_t { read, write, atomic };

// One cp.async that its thread has not waited for yet.
struct Copy {
  const void* src;
  uint32_t dst;
  uint16_t bytes, valid_bytes;
  uint32_t group;
  Location at;
};

struct Fiber {
  Context context;
  char* stack = nullptr;
  Wait wait = Wait::nothing;
  const char* waits_in = "";  // name of the primitive, for reports
  Location at{"", 0};         // the last primitive this thread blocked in
  uint32_t wait_a = 0, wait_b = 0;
  std::vector<Copy> copies;  // [first_copy, end) are in flight, in order of issue
  size_t first_copy = 0;
  uint32_t copy_group = 0;  // groups committed so far
  HopperThread hopper;
};

// Where the lanes of a warp meet. The last to arrive computes for all 32.
struct Collective {
  const char* name;
  void (*execute)(struct Block& block, int warp);
};
struct Warp {
  const Collective* op = nullptr;
  Location at{"", 0};
  int arrived = 0;
  void* arguments[32];
};

constexpr int kMaxWarps = 32;
using ThreadSet = uint32_t[kMaxWarps];  // one bit a thread

struct Barrier {
  int expected = 0, arrived = 0;
  bool vote = false, result = false;  // of the threads so far; of the phase that completed last
  ThreadSet waiting = {};
  std::vector<uint32_t> clock;
};

struct Block {
  const Options* options = nullptr;
  const Buffer* buffers = nullptr;
  int buffer_count = 0, buffer_hint = 0;
  Statistics statistics{};
  void (*entry)(const void*) = nullptr;
  const void* params = nullptr;
  size_t param_bytes = 0;
  uint32_t threads = 0, index = 0, grid = 0;

  std::vector<Fiber> fibers;
  Context main;
  int current = -1;  // the running thread
  int exited = 0;
  uint64_t random_state = 1;
  std::string error;

  ThreadSet ready = {};
  uint32_t ready_warps = 0;
  int warp = 0;  // the warp that ran last: staying in it keeps its stacks in cache
  int lane = 0;  // and its lane, when threads run in turn
  Warp warps[kMaxWarps];
  Barrier barriers[16];

  std::vector<uint8_t> arena;  // shared memory between two stretches that nothing may touch
  uint8_t* shared = nullptr;
  uint32_t shared_bytes = 0;
  std::vector<uint8_t> writes_in_flight;  // per 4 bytes: asynchronous writes not yet waited for
  std::vector<uint8_t> reads_in_flight;   // per 16 bytes: asynchronous reads not yet waited for
  RaceDetector race;
  HopperBlock hopper;

  uint32_t random() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return static_cast<uint32_t>(random_state >> 20);
  }
  bool chance(uint32_t one_in) { return one_in != 0 && random() % one_in == 0; }
};

extern thread_local Block* block;

// Scheduling. A fiber that suspends comes back when another makes it ready.
void suspend(Wait wait, const char* name, Location at, uint32_t a = 0, uint32_t b = 0);
void make_ready(int thread);
void make_ready(const ThreadSet& threads);
void yield();           // others may run first
void perhaps_yield();   // at the seed's whim
void run_block(Block& b);
[[noreturn]] void fail(int thread, Location at, const char* format, ...) __attribute__((format(printf, 3, 4)));

// Warp collectives: suspends until all 32 lanes have come, then returns in each of them.
void meet(const Collective& op, void* arguments, Location at);

// Memory. thread is the one on whose behalf the access happens.
uint8_t* shared_at(Block& b, int thread, uint32_t address, uint32_t bytes, Access access, Location at);
void check_shared_range(Block& b, int thread, uint32_t address, uint32_t bytes, const char* what, Location at);
void check_global(Block& b, int thread, const void* pointer, size_t bytes, Access access, const char* what,
                  Location at);
void mark_writes(Block& b, uint32_t offset, uint32_t bytes, int change);
void mark_reads(Block& b, uint32_t offset, uint32_t bytes, int change);
void atomic_add_float(float* pointer, float value);

inline const char* base_name(const char* path) {
  const char* slash = path ? std::strrchr(path, '/') : nullptr;
  return slash ? slash + 1 : path ? path : "?";
}

}  // namespace cuflash::emulator
