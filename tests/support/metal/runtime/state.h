// The state of one launch. Threads of Metal are fibers of one thread here, so nothing is locked.
#pragma once
#include "msl/abi.h"

namespace msl {

enum class State : uint8_t { ready, at_simd_operation, at_barrier, done };
enum Space { threadgroup_space, device_space, space_count };
// The values of mem_flags in Metal.
constexpr uint32_t kFenceDevice = 1, kFenceThreadgroup = 2;

struct Fiber {
  void* stack_pointer;
  uint8_t *stack_low, *stack_high;
  State state;
  msl_thread thread;
  // The operation at which it waits.
  const char* operation;
  msl_site site;
  uint32_t argument, uniform, fences;
  uint32_t active;
  alignas(16) char value[kSimdValueBytes];
};

struct Simdgroup {
  alignas(16) char values[kSimdWidth][kSimdValueBytes];
  uint32_t fence_time[space_count];  // of the last barrier that orders it, simdgroup or threadgroup
};

inline const msl_launch* launch;
inline msl_report* report;
inline Fiber* fibers;
inline Fiber* current;  // null between fibers
inline void* scheduler_stack;
inline bool aborted;
inline uint32_t thread_count;  // of the present threadgroup
inline Simdgroup simdgroups[kMaxThreads / kSimdWidth];

// Time counts barriers and threadgroups over the whole launch.
inline uint32_t now, group_start, barrier_time[space_count];

// Addresses of this library and of threadgroup memory in it.
inline uintptr_t module_low, module_high, threadgroup_low, threadgroup_high;

// Adds a finding; one for each kind and place is kept. `pc`, `other_pc` may be 0.
void find(const char* kind, const char* file, int line, uintptr_t pc, uintptr_t other_pc,
          const char* format, ...) __attribute__((format(printf, 6, 7)));
void leave_fiber();               // back to the scheduler, to be resumed later
[[noreturn]] void abort_fiber();  // back to the scheduler, and the launch ends

void run_threadgroup(const uint32_t group[3], const uint32_t groups[3]);

// Shadow memory: who last wrote and read each byte. One per launch.
void open_shadow();
void check_outputs_written();

// Traffic. A simdgroup's accesses are counted when its threadgroup ends.
void open_traffic();
void record_threadgroup_access(uint32_t bytes, bool write);
void record_access(uint32_t buffer, uintptr_t address, uint32_t bytes, bool write, uintptr_t pc);
void count_threadgroup_traffic();
void finish_traffic();

}  // namespace msl
