// What the generated kernel, the runtime and emulator.py share. The structures are mirrored there.
#pragma once
#include <stdint.h>

constexpr uint32_t kSimdWidth = 32;
constexpr uint32_t kMaxThreads = 1024;  // of one threadgroup
constexpr uint32_t kMaxBuffers = 32;
constexpr uint32_t kMaxFindings = 32;
constexpr uint32_t kSimdValueBytes = 16;

// Where a thread stands, by the names of Metal's attributes.
struct msl_thread {
  uint32_t position_in_grid[3], position_in_threadgroup[3], threadgroup_position[3];
  uint32_t threads_per_threadgroup[3], dispatch_threads_per_threadgroup[3];
  uint32_t threads_per_grid[3], threadgroups_per_grid[3];
  uint32_t index, lane, simdgroup, simdgroups, dispatch_simdgroups;
};

// Where a kernel calls a barrier or a simd operation.
struct msl_site {
  const char* file;
  int32_t line, column;
};

// The values that the lanes of a simdgroup brought to an operation, kSimdValueBytes apart.
struct msl_simd_values {
  const char* data;
  uint32_t active;  // a bit for each lane
  uint32_t lane;
};

struct msl_buffer {
  uint8_t* base;
  uint64_t bytes;
  const char* name;
  uint32_t element_bytes;
  uint32_t writable;
};

struct msl_launch {
  uint32_t grid[3], threadgroup[3];
  uint32_t buffer_count, order, seed, check, count, flush_to_zero, timeout_s;
  void** arguments;
  msl_buffer* buffers;
};

struct msl_finding {
  char kind[24];
  char message[320];
  char file[160];
  int32_t line;
  uint32_t in_thread;
  uint32_t threadgroup[3], thread[3];
  uint64_t pc, other_pc;  // relative to the library; 0: none
};

// What moved between threads and one buffer, in one direction.
struct msl_traffic {
  uint64_t bytes, moved_bytes, distinct_bytes, transactions, transactions_needed;
};

struct msl_report {
  uint32_t findings;
  uint64_t threadgroup_bytes, barriers, simd_operations, arithmetic;
  uint64_t threadgroup_loaded, threadgroup_stored;
  msl_traffic loads[kMaxBuffers], stores[kMaxBuffers];
  msl_finding finding[kMaxFindings];
};

extern "C" {
// A rendezvous of the simdgroup. `argument` (a lane number, a mask) must be the same in all lanes
// where `uniform` says so.
void msl_simd_operation(const char* name, const void* value, uint32_t bytes, uint32_t argument,
                        int uniform, msl_site site, msl_simd_values* values);
void msl_barrier(int simdgroup_only, uint32_t flags, msl_site site);
void msl_error(const char* kind, const char* message, msl_site site);
void msl_redzone(const void* address);
enum msl_atomic_kind { msl_atomic_load, msl_atomic_store, msl_atomic_update };
void msl_check_atomic(const volatile void* address, uint32_t bytes, int kind);
uint32_t msl_lane();
// The generated kernel: `arguments` in the order of its parameters.
void msl_kernel(void* const* arguments, const msl_thread* thread);
}
