// The watchdog asks first: it raises a flag that the scheduler reads. A kernel that spins without ever calling a
// primitive is then stopped by a signal, whose handler leaves the fiber for good.
#include "emulator/runtime/watchdog.h"

#include <signal.h>

#include <chrono>
#include <cstdio>

#include "emulator/runtime/state.h"

namespace cuflash::emulator {

static thread_local std::atomic<bool> fired{false};
static constexpr int kSignal = SIGURG;  // ignored by default and rarely used
static constexpr auto kGrace = std::chrono::milliseconds(500);

bool watchdog_fired() { return fired.load(std::memory_order_relaxed); }

std::string watchdog_report(Block& b) {
  const int thread = b.current < 0 ? 0 : b.current;
  const Fiber& f = b.fibers[thread];
  char text[300];
  snprintf(text, sizeof text,
           "watchdog: the launch ran longer than %g seconds; thread %d of block %u was running, last waiting at %s:%d",
           b.options->watchdog_seconds, thread, b.index, base_name(f.at.file), f.at.line);
  return text;
}

static void stop_kernel(int) {
  Block* b = block;
  if (b == nullptr || b->current < 0 || !watchdog_fired()) return;
  b->error = watchdog_report(*b) + " (it calls no primitive)";
  switch_context(b->fibers[b->current].context, b->main);
}

Watchdog::Watchdog(double seconds) : flag_(&fired), target_(pthread_self()) {
  fired = false;
  if (seconds <= 0) return;
  struct sigaction action = {};
  action.sa_handler = stop_kernel;
  action.sa_flags = SA_NODEFER;  // the handler does not return: the signal must not stay blocked
  sigaction(kSignal, &action, nullptr);
  thread_ = std::thread([this, seconds] { watch(seconds); });
}

void Watchdog::watch(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto limit = std::chrono::duration<double>(seconds);
  if (done_.wait_for(lock, limit, [this] { return finished_; })) return;
  *flag_ = true;
  if (done_.wait_for(lock, kGrace, [this] { return finished_; })) return;
  pthread_kill(target_, kSignal);
}

Watchdog::~Watchdog() {
  if (thread_.joinable()) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      finished_ = true;
    }
    done_.notify_one();
    thread_.join();
  }
  fired = false;
}

}  // namespace cuflash::emulator
