// Vector clocks and the shadow of shared memory.
#include "emulator/runtime/race.h"

#include <algorithm>
#include <cstdio>

#include "emulator/runtime/state.h"

namespace cuflash::emulator {

constexpr uint32_t kGranuleBytes = 16, kCellBytes = 2;

void RaceDetector::reset(bool enabled, int threads, uint32_t shared_bytes) {
  enabled_ = enabled;
  if (!enabled) return;
  threads_ = threads;
  width_ = threads + kEngines;
  clocks_.assign(static_cast<size_t>(threads) * width_, 0);
  for (int t = 0; t < threads; ++t) clocks_of(t)[t] = 1;
  std::fill(std::begin(engine_time_), std::end(engine_time_), 0);
  granules_.assign(shared_bytes / kGranuleBytes + 2, Cell{});
  split_of_.assign(granules_.size(), -1);
  splits_.clear();
}

Actor RaceDetector::thread(int thread) const {
  const uint32_t* clocks = clocks_of(thread);
  return {thread, thread, clocks, clocks[thread], thread / 32 % kWarpSlots, false};
}

Actor RaceDetector::copy_engine(int thread, int engine, const std::vector<uint32_t>& clocks) {
  const int index = kWarpgroupEngines + engine % (kEngines - kWarpgroupEngines);
  return {thread, threads_ + index, clocks.data(), ++engine_time_[index], thread / 32 % kWarpSlots, true};
}

Actor RaceDetector::product(int thread, size_t number) const {
  const int warpgroup = thread / 128;
  const int slot = kWarpSlots + warpgroup % (kReaderSlots - kWarpSlots);
  return {thread, threads_ + warpgroup, clocks_of(thread), static_cast<uint32_t>(number + 1), slot, true};
}

void RaceDetector::acquire_products(int thread, size_t count) {
  if (enabled_) clocks_of(thread)[threads_ + thread / 128] = static_cast<uint32_t>(count);
}

void RaceDetector::release(std::vector<uint32_t>& clock, int thread) {
  if (!enabled_) return;
  uint32_t* own = clocks_of(thread);
  if (clock.empty()) clock.assign(width_, 0);
  for (int i = 0; i < width_; ++i) clock[i] = std::max(clock[i], own[i]);
  ++own[thread];
}

void RaceDetector::acquire(const std::vector<uint32_t>& clock, int thread) {
  if (!enabled_ || clock.empty()) return;
  uint32_t* own = clocks_of(thread);
  for (int i = 0; i < width_; ++i) own[i] = std::max(own[i], clock[i]);
}

std::vector<uint32_t> RaceDetector::snapshot(int thread) const {
  if (!enabled_) return {};
  return {clocks_of(thread), clocks_of(thread) + width_};
}

void RaceDetector::join(std::vector<uint32_t>& clock, const std::vector<uint32_t>& other) const {
  if (!enabled_) return;
  if (clock.empty()) clock.assign(width_, 0);
  for (int i = 0; i < width_; ++i) clock[i] = std::max(clock[i], other[i]);
}

static std::string name_of(int clock_index, int threads) {
  if (clock_index < threads) return "thread " + std::to_string(clock_index);
  if (clock_index < threads + RaceDetector::kWarpgroupEngines) {
    return "a wgmma of warpgroup " + std::to_string(clock_index - threads);
  }
  return "an asynchronous copy";
}

void RaceDetector::touch(Block& b, Cell& cell, const Actor& actor, uint32_t offset, bool write, Location at) {
  const auto report = [&](const char* earlier, int other) {
    fail(actor.thread, at, "shared-memory race at smem+%u: %s by %s is not ordered after the %s by %s", offset,
         write ? "write" : "read", name_of(actor.clock_index, threads_).c_str(), earlier,
         name_of(other, threads_).c_str());
  };
  if (cell.write_time > actor.clocks[cell.writer] && cell.writer != actor.clock_index) report("write", cell.writer);
  if (write) {
    for (uint32_t slots = cell.readers; slots != 0; slots &= slots - 1) {
      const int slot = __builtin_ctz(slots);
      const int other = cell.reader[slot];
      if (other != actor.clock_index && cell.read_time[slot] > actor.clocks[other]) report("read", other);
    }
    cell.readers = 0;
    cell.writer = static_cast<uint16_t>(actor.clock_index);
    cell.write_time = actor.now;
    cell.write_fences = actor.async_proxy ? kAsyncWrite : b.fibers[actor.thread].hopper.proxy_fences;
    return;
  }
  const bool by_thread = cell.write_time != 0 && cell.write_fences != kAsyncWrite;
  if (actor.async_proxy && by_thread && b.fibers[cell.writer].hopper.proxy_fences <= cell.write_fences) {
    fail(actor.thread, at, "missing fence.proxy.async: %s reads smem+%u, which thread %d wrote as ordinary memory",
         name_of(actor.clock_index, threads_).c_str(), offset, cell.writer);
  }
  cell.readers |= 1u << actor.reader_slot;
  cell.reader[actor.reader_slot] = static_cast<uint16_t>(actor.clock_index);
  cell.read_time[actor.reader_slot] = actor.now;
}

void RaceDetector::access(Block& b, const Actor& actor, uint32_t offset, uint32_t bytes, bool write, Location at) {
  const uint32_t end = offset + bytes;
  for (uint32_t g = offset / kGranuleBytes; g * kGranuleBytes < end; ++g) {
    const uint32_t begin = g * kGranuleBytes;
    const bool whole = offset <= begin && end >= begin + kGranuleBytes;
    if (split_of_[g] < 0 && whole) {
      touch(b, granules_[g], actor, begin, write, at);
      continue;
    }
    if (split_of_[g] < 0) {
      split_of_[g] = static_cast<int32_t>(splits_.size());
      splits_.emplace_back();
      for (Cell& cell : splits_.back().cells) cell = granules_[g];
    }
    Cell* cells = splits_[split_of_[g]].cells;
    const uint32_t first = std::max(offset, begin) - begin, last = std::min(end, begin + kGranuleBytes) - begin - 1;
    for (uint32_t c = first / kCellBytes; c <= last / kCellBytes; ++c) {
      touch(b, cells[c], actor, begin + c * kCellBytes, write, at);
    }
  }
}

}  // namespace cuflash::emulator
