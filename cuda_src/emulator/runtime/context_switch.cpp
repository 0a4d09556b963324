// Saves the registers that a called function must preserve on the stack of one fiber and takes up another's.
// A switch costs a few nanoseconds; ucontext, which enters the kernel to save the signal mask, some 250.
#include "emulator/runtime/context_switch.h"

#include <cstdint>
#include <cstring>

namespace cuflash::emulator {

#ifdef CUFLASH_EMULATOR_UCONTEXT

void prepare_context(Context& context, char* stack, std::size_t bytes, void (*entry)()) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack;
  context.state.uc_stack.ss_size = bytes;
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}

void switch_context(Context& from, Context& to) { swapcontext(&from.state, &to.state); }

#else

#define CUFLASH_TEXT2(x) #x
#define CUFLASH_TEXT(x) CUFLASH_TEXT2(x)
#define CUFLASH_SWITCH_LABEL CUFLASH_TEXT(__USER_LABEL_PREFIX__) "cuflash_emulator_switch"

extern "C" void cuflash_emulator_switch(void** save, void* load);

#ifdef __x86_64__
// rbx, rbp, r12 to r15; the return address lies above them. The entry address comes first on a fresh stack.
asm(".text\n.globl " CUFLASH_SWITCH_LABEL "\n" CUFLASH_SWITCH_LABEL ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n");
constexpr int kSavedWords = 6;
constexpr int kEntryWord = 6;
constexpr int kFrameWords = 8;  // a zero above the entry address keeps the stack aligned as after a call
#else
// x19 to x30 and d8 to d15; x30 is where ret goes.
asm(".text\n.globl " CUFLASH_SWITCH_LABEL "\n.p2align 2\n" CUFLASH_SWITCH_LABEL ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n");
constexpr int kSavedWords = 20;
constexpr int kEntryWord = 11;
constexpr int kFrameWords = 20;
#endif

void prepare_context(Context& context, char* stack, std::size_t bytes, void (*entry)()) {
  auto top = (reinterpret_cast<std::uintptr_t>(stack) + bytes) & ~std::uintptr_t{15};
  auto* frame = reinterpret_cast<std::uintptr_t*>(top) - kFrameWords;
  std::memset(frame, 0, kFrameWords * sizeof(*frame));
  static_assert(kSavedWords <= kFrameWords);
  frame[kEntryWord] = reinterpret_cast<std::uintptr_t>(entry);
  context.stack_pointer = frame;
}

void switch_context(Context& from, Context& to) { cuflash_emulator_switch(&from.stack_pointer, to.stack_pointer); }

#endif

}  // namespace cuflash::emulator
