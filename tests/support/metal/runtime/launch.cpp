// One launch, in a process of its own, so that a crash or an endless loop ends only that.
#include <errno.h>
#include <link.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include <initializer_list>

#include "state.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// The linker's names for the section of threadgroup variables.
extern "C" char __start_msl_threadgroup[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_msl_threadgroup[] __attribute__((weak, visibility("hidden")));

namespace msl {

void find(const char* kind, const char* file, int line, uintptr_t pc, uintptr_t other_pc,
          const char* format, ...) {
  if (!file) file = "";
  if (pc) pc -= module_low;
  for (uint32_t i = 0; i < report->findings; i++) {
    const msl_finding& known = report->finding[i];
    if (!strcmp(known.kind, kind) && known.line == line && known.pc == pc &&
        !strncmp(known.file, file, sizeof known.file - 1))
      return;
  }
  if (report->findings == kMaxFindings) return;
  msl_finding& finding = report->finding[report->findings++];
  snprintf(finding.kind, sizeof finding.kind, "%s", kind);
  snprintf(finding.file, sizeof finding.file, "%s", file);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(finding.message, sizeof finding.message, format, arguments);
  va_end(arguments);
  finding.line = line;
  finding.pc = pc;
  finding.other_pc = other_pc;
  finding.in_thread = current != nullptr;
  if (!current) return;
  memcpy(finding.threadgroup, current->thread.threadgroup_position, sizeof finding.threadgroup);
  memcpy(finding.thread, current->thread.position_in_threadgroup, sizeof finding.thread);
}

namespace {

constexpr uint64_t kStackBytes = 256 << 10, kGuardBytes = 4096;
// Around each buffer nothing is mapped, so that even an unchecked access far outside is seen.
constexpr uint64_t kGapBytes = 64ull << 20, kPageBytes = 4096;

int find_module(dl_phdr_info* info, size_t, void*) {
  const uintptr_t self = reinterpret_cast<uintptr_t>(&find_module);
  uintptr_t low = UINTPTR_MAX, high = 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    const uintptr_t start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
    const uintptr_t end = start + info->dlpi_phdr[i].p_memsz;
    if (start < low) low = start;
    if (end > high) high = end;
  }
  if (self < low || self >= high) return 0;
  module_low = low;
  module_high = high;
  return 1;
}

void on_signal(int number, siginfo_t* info, void* context) {
  const ucontext_t* registers = static_cast<ucontext_t*>(context);
#if defined(__x86_64__)
  uintptr_t pc = registers->uc_mcontext.gregs[REG_RIP];
#else
  uintptr_t pc = registers->uc_mcontext.pc;
#endif
  // One more, as for a return address, which lies behind its call.
  pc = pc >= module_low && pc < module_high ? pc + 1 : 0;
  const uintptr_t address = reinterpret_cast<uintptr_t>(info->si_addr);
  const uintptr_t stack = current ? reinterpret_cast<uintptr_t>(current->stack_low) : 0;
  if (number == SIGILL || number == SIGTRAP)
    find("object-bounds", nullptr, 0, pc, 0, "access outside of a private or threadgroup array");
  else if (number == SIGSEGV && address < stack && address >= stack - (1u << 20))
    find("private-memory", nullptr, 0, pc, 0,
         "private memory takes more than the emulator's %llu bytes",
         static_cast<unsigned long long>(kStackBytes));
  else find("crash", nullptr, 0, pc, 0, "%s at address %p", strsignal(number), info->si_addr);
  _exit(1);
}

void catch_signals() {
  static char stack[64 << 10];
  stack_t alternative = {};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof stack;
  sigaltstack(&alternative, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int number : {SIGILL, SIGTRAP, SIGSEGV, SIGBUS, SIGFPE}) sigaction(number, &action, nullptr);
  for (int number : {SIGALRM, SIGINT, SIGTERM}) signal(number, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
}

bool make_fibers() {
  const uint32_t* size = launch->threadgroup;
  const uint64_t count = size[0] * size[1] * size[2], stride = kStackBytes + kGuardBytes;
  void* stacks = mmap(nullptr, stride * count, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) return false;
  fibers = new Fiber[count]();
  for (uint64_t i = 0; i < count; i++) {
    uint8_t* guard = static_cast<uint8_t*>(stacks) + stride * i;
    mprotect(guard, kGuardBytes, PROT_NONE);
    fibers[i].stack_low = guard + kGuardBytes;
    fibers[i].stack_high = fibers[i].stack_low + kStackBytes;
  }
  return true;
}

void flush_subnormals_to_zero() {
#if defined(__x86_64__)
  __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);
#else
  uint64_t control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  asm volatile("msr fpcr, %0" : : "r"(control | (1ull << 24)));
#endif
}

void run_all() {
  dl_iterate_phdr(find_module, nullptr);
  threadgroup_low = reinterpret_cast<uintptr_t>(__start_msl_threadgroup);
  threadgroup_high = reinterpret_cast<uintptr_t>(__stop_msl_threadgroup);
  report->threadgroup_bytes = threadgroup_high - threadgroup_low;
  catch_signals();
  if (!make_fibers()) return find("crash", nullptr, 0, 0, 0, "no memory for the threads' stacks");
  if (launch->check) open_shadow();
  if (launch->count) open_traffic();
  if (launch->flush_to_zero) flush_subnormals_to_zero();
  uint32_t groups[3];
  for (int k = 0; k < 3; k++)
    groups[k] = (launch->grid[k] + launch->threadgroup[k] - 1) / launch->threadgroup[k];
  const uint64_t count = uint64_t(groups[0]) * groups[1] * groups[2];
  for (uint64_t i = 0; i < count && !aborted; i++) {
    const uint64_t j = launch->order == 1 ? count - 1 - i : i;
    const uint32_t group[3] = {uint32_t(j % groups[0]), uint32_t(j / groups[0] % groups[1]),
                               uint32_t(j / groups[0] / groups[1])};
    run_threadgroup(group, groups);
    if (launch->count && !aborted) count_threadgroup_traffic();
  }
  if (launch->check && !aborted) check_outputs_written();
  if (launch->count) finish_traffic();
}

}  // namespace
}  // namespace msl

using namespace msl;

extern "C" void msl_error(const char* kind, const char* message, msl_site site) {
  find(kind, site.file, site.line, 0, 0, "%s", message);
}

// Runs a launch. `result` is shared memory, as are the buffers. Gives the process's wait status.
EXPORT int msl_run(const msl_launch* description, msl_report* result) {
  const pid_t child = fork();
  if (child < 0) return -1;
  if (child == 0) {
    launch = description;
    report = result;
    alarm(description->timeout_s);
    run_all();
    _exit(0);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  return status;
}

// Zeroed memory that a child process shares, and behind it nothing. Null: none is left.
EXPORT void* msl_allocate(uint64_t bytes, uint64_t alignment, void** mapping, uint64_t* mapped) {
  const uint64_t body = (bytes + alignment + kPageBytes) / kPageBytes * kPageBytes;
  *mapped = body + 2 * kGapBytes;
  void* memory =
      mmap(nullptr, *mapped, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  *mapping = memory;
  mprotect(static_cast<uint8_t*>(memory) + kGapBytes, body, PROT_READ | PROT_WRITE);
  const uintptr_t end = reinterpret_cast<uintptr_t>(memory) + kGapBytes + body;
  return reinterpret_cast<void*>((end - bytes) / alignment * alignment);
}

EXPORT void msl_free(void* mapping, uint64_t mapped) {
  munmap(mapping, mapped);
}

// For the other side of msl/abi.h to compare.
EXPORT uint64_t msl_layout_bytes() {
  return sizeof(msl_report) + sizeof(msl_launch);
}
