// A fiber's saved place, and the jump from one to another.
#pragma once
#include <cstddef>

#if !defined(CUFLASH_EMULATOR_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define CUFLASH_EMULATOR_UCONTEXT
#endif
#ifdef CUFLASH_EMULATOR_UCONTEXT
#include <ucontext.h>
#endif

namespace cuflash::emulator {

struct Context {
#ifdef CUFLASH_EMULATOR_UCONTEXT
  ucontext_t state;
#else
  void* stack_pointer = nullptr;
#endif
};

// Makes a context that begins entry() on the given stack; entry never returns.
void prepare_context(Context& context, char* stack, std::size_t bytes, void (*entry)());
void switch_context(Context& from, Context& to);

}  // namespace cuflash::emulator
