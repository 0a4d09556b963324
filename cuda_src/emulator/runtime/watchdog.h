// Ends a launch that runs too long: a loop on something that never changes, or a kernel far too big to emulate.
#pragma once
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace cuflash::emulator {

struct Block;

inline constexpr unsigned long kStackBytes = 256 << 10;

// Set by the watchdog's own thread; the scheduler looks at every switch.
bool watchdog_fired();
std::string watchdog_report(Block& b);

// Watches one operating-system thread for the life of this object.
class Watchdog {
 public:
  explicit Watchdog(double seconds);
  ~Watchdog();

 private:
  void watch(double seconds);
  std::mutex mutex_;
  std::condition_variable done_;
  bool finished_ = false;
  std::atomic<bool>* flag_;
  pthread_t target_;
  std::thread thread_;
};

}  // namespace cuflash::emulator
