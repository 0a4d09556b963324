// Happens-before check of shared memory by vector clocks.
//
// Every thread has a clock; a barrier, a warp barrier or an mbarrier joins clocks. Shuffles, mma and ldmatrix order
// nothing, as on the GPU. An access races with an earlier one that its thread's clock does not cover. Shared memory is
// shadowed by granules of 16 bytes, the unit of most copies; a narrower access splits its granule into 2-byte cells.
// One reader a warp is remembered: a race can be missed in one schedule, so run several seeds.
#pragma once
#include <cstdint>
#include <vector>

#include "emulator/runtime/interface.h"

namespace cuflash::emulator {

struct Block;

// Who touches memory: a thread, or an engine (copies, matrix products) that acts for one.
struct Actor {
  int thread;              // for reports; for an engine the thread that issued
  int clock_index;         // whose component of the clocks stands for it
  const uint32_t* clocks;  // what it has seen
  uint32_t now;            // its own time
  int reader_slot;
  bool async_proxy;  // its reads need fence.proxy.async between them and ordinary writes
};

constexpr int kWarpSlots = 16;
constexpr int kReaderSlots = kWarpSlots + 4;  // and one for each warpgroup's products

struct Cell {
  uint32_t write_time;    // 0: never written
  uint32_t write_fences;  // proxy fences that the writer had made; kAsyncWrite for a copy engine
  uint32_t readers;       // bit s: read_time[s] and reader[s] hold a read since the last write
  uint16_t writer;        // clock index
  uint16_t reader[kReaderSlots];  // clock index
  uint32_t read_time[kReaderSlots];
};

class RaceDetector {
 public:
  static constexpr int kEngines = 64;  // one for each mbarrier, shared when there are more, and one for each warpgroup
  static constexpr int kWarpgroupEngines = 8;
  static constexpr uint32_t kAsyncWrite = 0xffffffffu;

  void reset(bool enabled, int threads, uint32_t shared_bytes);
  bool enabled() const { return enabled_; }

  Actor thread(int thread) const;
  // A copy engine that has seen what is in clocks; its time advances.
  Actor copy_engine(int thread, int engine, const std::vector<uint32_t>& clocks);
  // A product of the thread's warpgroup; its time is its number. Whoever waits for products learns how many are done.
  Actor product(int thread, size_t number) const;
  void acquire_products(int thread, size_t count);

  void access(Block& b, const Actor& actor, uint32_t offset, uint32_t bytes, bool write, Location at);

  // The edges: what a thread has done so far goes into a clock; what a clock knows becomes known to a thread.
  void release(std::vector<uint32_t>& clock, int thread);
  void acquire(const std::vector<uint32_t>& clock, int thread);
  std::vector<uint32_t> snapshot(int thread) const;
  void join(std::vector<uint32_t>& clock, const std::vector<uint32_t>& other) const;

 private:
  struct Split {
    Cell cells[8];
  };
  void touch(Block& b, Cell& cell, const Actor& actor, uint32_t offset, bool write, Location at);
  uint32_t* clocks_of(int thread) { return clocks_.data() + static_cast<size_t>(thread) * width_; }
  const uint32_t* clocks_of(int thread) const { return clocks_.data() + static_cast<size_t>(thread) * width_; }

  bool enabled_ = false;
  int threads_ = 0, width_ = 0;
  std::vector<uint32_t> clocks_;  // [threads, width]: threads, then copy engines
  uint32_t engine_time_[kEngines] = {};
  std::vector<Cell> granules_;
  std::vector<int32_t> split_of_;  // -1: the granule is uniform
  std::vector<Split> splits_;
};

}  // namespace cuflash::emulator
