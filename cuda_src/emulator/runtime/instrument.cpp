// The compiler's own memory callbacks. A kernel built with -fsanitize=thread and linked with this file instead of the
// sanitizer's library tells the emulator of every load and store that it makes through pointers, so overruns are caught
// and a thread may lose its turn anywhere. Constants of the kernel's library are none of the emulator's business.
#include <cstddef>
#include <cstring>

#include "emulator/runtime/interface.h"

extern "C" {
#ifdef __ELF__
extern char __ehdr_start __attribute__((visibility("hidden"))), _end __attribute__((visibility("hidden")));
static bool is_own(const void* p) {
  return static_cast<const char*>(p) >= &__ehdr_start && static_cast<const char*>(p) < &_end;
}
static unsigned long offset_of(void* code) {
  return static_cast<unsigned long>(static_cast<char*>(code) - &__ehdr_start);
}
#else
static bool is_own(const void*) { return false; }
static unsigned long offset_of(void* code) { return reinterpret_cast<unsigned long>(code); }
#endif

static void tell(const void* p, unsigned long bytes, int kind, void* code) {
  if (!is_own(p)) cuflash::emulator::instrumented_access(p, bytes, kind, offset_of(code));
}

#define CUFLASH_READ(name, bytes) \
  void name(void* p) { tell(p, bytes, 0, __builtin_return_address(0)); }
#define CUFLASH_WRITE(name, bytes) \
  void name(void* p) { tell(p, bytes, 1, __builtin_return_address(0)); }
#define CUFLASH_SIZE(n)                       \
  CUFLASH_READ(__tsan_read##n, n)             \
  CUFLASH_READ(__tsan_unaligned_read##n, n)   \
  CUFLASH_READ(__tsan_volatile_read##n, n)    \
  CUFLASH_WRITE(__tsan_write##n, n)           \
  CUFLASH_WRITE(__tsan_unaligned_write##n, n) \
  CUFLASH_WRITE(__tsan_volatile_write##n, n)  \
  CUFLASH_WRITE(__tsan_read_write##n, n)      \
  CUFLASH_WRITE(__tsan_unaligned_read_write##n, n)
CUFLASH_SIZE(1)
CUFLASH_SIZE(2)
CUFLASH_SIZE(4)
CUFLASH_SIZE(8)
CUFLASH_SIZE(16)

void __tsan_read_range(void* p, size_t bytes) { tell(p, bytes, 0, __builtin_return_address(0)); }
void __tsan_write_range(void* p, size_t bytes) { tell(p, bytes, 1, __builtin_return_address(0)); }

// Block copies: g++ leaves the calls alone, clang names them.
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  tell(from, bytes, 0, __builtin_return_address(0));
  tell(to, bytes, 1, __builtin_return_address(0));
  return memcpy(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
  tell(to, bytes, 1, __builtin_return_address(0));
  return memset(to, value, bytes);
}

// The rest of the callbacks carry nothing that matters here.
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
int __tsan_atomic_thread_fence(int) { return 0; }
}
