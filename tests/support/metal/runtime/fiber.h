// Switching between stacks: saves and restores what a called function must preserve.
#pragma once
#include <stdint.h>
#include <string.h>

extern "C" void msl_switch_stack(void** save, void* load);

#if defined(__x86_64__)
asm(R"(
.text
.type msl_switch_stack,@function
.hidden msl_switch_stack
.weak msl_switch_stack
msl_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#elif defined(__aarch64__)
asm(R"(
.text
.type msl_switch_stack,@function
.hidden msl_switch_stack
.weak msl_switch_stack
msl_switch_stack:
  sub sp, sp, #176
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #176
  ret
)");
#else
#error "the Metal emulator has no context switch for this processor"
#endif

namespace msl {

// A stack that starts in `entry` when it is first switched to.
inline void* new_stack(uint8_t* top, void (*entry)()) {
  uintptr_t aligned = reinterpret_cast<uintptr_t>(top) & ~uintptr_t(15);
#if defined(__x86_64__)
  uint64_t* stack = reinterpret_cast<uint64_t*>(aligned);
  *--stack = 0;  // the return address of `entry`, which also puts its stack at 8 modulo 16
  *--stack = reinterpret_cast<uint64_t>(entry);
  for (int i = 0; i < 6; i++) *--stack = 0;
#else
  uint64_t* stack = reinterpret_cast<uint64_t*>(aligned - 176);
  memset(stack, 0, 176);
  stack[11] = reinterpret_cast<uint64_t>(entry);  // x30
#endif
  return stack;
}

}  // namespace msl
