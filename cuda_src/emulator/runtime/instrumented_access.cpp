// Judges one load or store that a kernel made through a pointer.
#include <cstdio>

#include "emulator/runtime/state.h"
#include "emulator/runtime/watchdog.h"

namespace cuflash::emulator {

static bool within(const void* pointer, const void* base, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) - reinterpret_cast<uintptr_t>(base) < bytes;
}

void instrumented_access(const void* pointer, unsigned long bytes, int kind, unsigned long code_offset) {
  Block* b = block;
  if (b == nullptr || b->current < 0) return;
  const int thread = b->current;
  // A thread's registers live on its stack; parameters are read in place.
  if (within(pointer, b->fibers[thread].stack, kStackBytes) || within(pointer, b->params, b->param_bytes)) return;
  char what[80];
  snprintf(what, sizeof what, "%s through a pointer [kernel+0x%lx]", kind == 0 ? "read" : "write", code_offset);
  const Location at{"kernel", 0};
  if (within(pointer, b->arena.data(), b->arena.size())) {
    fail(thread, at, "%s into shared memory: use load_shared and store_shared", what);
  }
  check_global(*b, thread, pointer, bytes, kind == 0 ? Access::read : Access::write, what, at);
  if (b->chance(static_cast<uint32_t>(b->options->preempt))) yield();
}

}  // namespace cuflash::emulator
