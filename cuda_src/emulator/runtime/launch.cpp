// The entry that Python calls: sets up blocks, runs them on one or more operating-system threads, returns the report.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <numeric>
#include <thread>

#include "emulator/runtime/hopper.h"
#include "emulator/runtime/state.h"
#include "emulator/runtime/watchdog.h"

namespace cuflash::emulator {

constexpr size_t kPageBytes = 65536;    // a guard larger than any host's page
constexpr size_t kMarginBytes = 65536;  // beside shared memory: an overrun by pointer arithmetic stays inside the arena

// Stacks are kept from launch to launch: fresh ones would fault in page by page.
class Stacks {
 public:
  ~Stacks() {
    for (char* stack : stacks_) munmap(stack - kPageBytes, kStackBytes + kPageBytes);
  }
  char* at(size_t index) {
    while (stacks_.size() <= index) {
      constexpr int kFlags = MAP_PRIVATE | MAP_ANON | MAP_NORESERVE;
      void* room = mmap(nullptr, kStackBytes + kPageBytes, PROT_READ | PROT_WRITE, kFlags, -1, 0);
      if (room == MAP_FAILED) return nullptr;
      mprotect(room, kPageBytes, PROT_NONE);
      stacks_.push_back(static_cast<char*>(room) + kPageBytes);
    }
    return stacks_[index];
  }

 private:
  std::vector<char*> stacks_;
};

struct Worker {
  Stacks stacks;
  Block block;
};

struct Launch {
  void (*entry)(const void*);
  const void* params;
  size_t param_bytes;
  uint32_t grid, threads, shared_bytes;
  const Options* options;
  const Buffer* buffers;
  int buffer_count;
};

static void begin_block(Worker& worker, const Launch& launch, uint32_t index) {
  Block& b = worker.block;
  b.index = index;
  b.exited = 0;
  b.current = -1;
  b.error.clear();
  b.ready_warps = 0;
  b.warp = 0;
  b.lane = -1;
  b.random_state = (launch.options->seed + 1) * 0x9e3779b97f4a7c15ull + index * 0xd1b54a32d192ed03ull;
  b.random_state |= 1;
  for (int i = 0; i < 3; ++i) b.random();
  std::fill(std::begin(b.ready), std::end(b.ready), 0);
  for (Warp& warp : b.warps) warp.arrived = 0;
  for (Barrier& barrier : b.barriers) {
    barrier.expected = barrier.arrived = 0;
    barrier.vote = false;
    std::fill(std::begin(barrier.waiting), std::end(barrier.waiting), 0);
    barrier.clock.clear();
  }
  const uint8_t fresh = launch.options->poison ? 0xff : 0;
  std::fill(b.arena.begin(), b.arena.end(), fresh);
  std::fill(b.writes_in_flight.begin(), b.writes_in_flight.end(), uint8_t{0});
  std::fill(b.reads_in_flight.begin(), b.reads_in_flight.end(), uint8_t{0});
  b.race.reset(launch.options->race != 0, static_cast<int>(launch.threads), launch.shared_bytes);
  b.hopper.mbarriers.clear();
  b.hopper.in_flight.clear();
  b.hopper.engines = 0;
  for (Warpgroup& group : b.hopper.warpgroups) group = {};
  b.hopper.free_registers = 65536 - static_cast<int>(launch.threads) * registers_at_start(launch.threads);
  for (Fiber& f : b.fibers) {
    f.wait = Wait::nothing;
    f.at = {"", 0};
    f.copies.clear();
    f.first_copy = 0;
    f.copy_group = 0;
    reset_hopper(f.hopper, launch.threads);
  }
}

static bool prepare_worker(Worker& worker, const Launch& launch) {
  Block& b = worker.block;
  b.options = launch.options;
  b.buffers = launch.buffers;
  b.buffer_count = launch.buffer_count;
  b.buffer_hint = 0;
  b.statistics = {};
  b.error.clear();
  b.entry = launch.entry;
  b.params = launch.params;
  b.param_bytes = launch.param_bytes;
  b.threads = launch.threads;
  b.grid = launch.grid;
  b.shared_bytes = launch.shared_bytes;
  b.arena.resize(launch.shared_bytes + 2 * kMarginBytes + 1024);
  const auto address = reinterpret_cast<uintptr_t>(b.arena.data()) + kMarginBytes;
  b.shared = reinterpret_cast<uint8_t*>((address + 1023) & ~uintptr_t{1023});
  b.writes_in_flight.resize(launch.shared_bytes / 4 + 4);
  b.reads_in_flight.resize(launch.shared_bytes / 16 + 2);
  b.fibers.resize(launch.threads);
  for (size_t t = 0; t < launch.threads; ++t) {
    b.fibers[t].stack = worker.stacks.at(t);
    if (b.fibers[t].stack == nullptr) {
      b.error = "no memory for the stacks of " + std::to_string(launch.threads) + " threads";
      return false;
    }
  }
  return true;
}

// A seeded walk through the grid: begins anywhere and steps by a number that shares no factor with its size.
static uint32_t nth_block(const Launch& launch, uint32_t n) {
  if (!launch.options->random_order || launch.grid < 3) return n;
  uint64_t step = launch.options->seed * 2654435761u % launch.grid;
  while (std::gcd(step, uint64_t{launch.grid}) != 1) step = (step + 1) % launch.grid;
  return static_cast<uint32_t>((launch.options->seed % launch.grid + n * step) % launch.grid);
}

static void add(Statistics& total, const Statistics& part) {
  auto* to = reinterpret_cast<uint64_t*>(&total);
  const auto* from = reinterpret_cast<const uint64_t*>(&part);
  for (size_t i = 0; i < sizeof(Statistics) / sizeof(uint64_t); ++i) to[i] += from[i];
}

static void work(Worker& worker, const Launch& launch, std::atomic<uint32_t>& next, std::atomic<bool>& failed) {
  if (!prepare_worker(worker, launch)) {
    failed = true;
    return;
  }
  Watchdog watchdog(launch.options->watchdog_seconds);
  for (uint32_t n; !failed && (n = next++) < launch.grid;) {
    begin_block(worker, launch, nth_block(launch, n));
    run_block(worker.block);
    worker.block.statistics.blocks++;
    if (!worker.block.error.empty()) failed = true;
  }
}

uint32_t thread_index() { return static_cast<uint32_t>(block->current); }
uint32_t thread_count() { return block->threads; }
uint32_t block_index() { return block->index; }
uint32_t grid_size() { return block->grid; }

}  // namespace cuflash::emulator

using namespace cuflash::emulator;

// Returns 0, or 1 with the report in message.
extern "C" __attribute__((visibility("default"))) int cuflash_emulator_launch(
    void (*entry)(const void*), const void* params, uint64_t param_bytes, uint32_t grid, uint32_t threads,
    uint32_t shared_bytes, const Options* options, const Buffer* buffers, int buffer_count, Statistics* statistics,
    char* message, uint64_t message_bytes) {
  static thread_local std::unique_ptr<Worker> own;
  if (!own) own = std::make_unique<Worker>();
  const Launch launch{entry, params, param_bytes, grid, threads, shared_bytes, options, buffers, buffer_count};
  std::atomic<uint32_t> next{0};
  std::atomic<bool> failed{false};
  std::vector<std::unique_ptr<Worker>> others;
  std::vector<std::thread> running;
  for (int i = 1; i < options->workers; ++i) {
    others.push_back(std::make_unique<Worker>());
    running.emplace_back([&, worker = others.back().get()] { work(*worker, launch, next, failed); });
  }
  work(*own, launch, next, failed);
  for (std::thread& thread : running) thread.join();
  std::string report = own->block.error;
  *statistics = own->block.statistics;
  for (const auto& other : others) {
    add(*statistics, other->block.statistics);
    if (report.empty()) report = other->block.error;
  }
  if (!failed) return 0;
  snprintf(message, message_bytes, "%s", report.c_str());
  return 1;
}
