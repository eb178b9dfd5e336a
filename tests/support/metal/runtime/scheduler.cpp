// Runs a threadgroup: each thread until it must wait for others, then what they wait for.
#include <stdio.h>
#include <string.h>

#include "fiber.h"
#include "state.h"

namespace msl {
namespace {

enum Order : uint32_t { forward, reverse, shuffled };
uint32_t random_state;

uint32_t next_random() {  // xorshift
  random_state ^= random_state << 13;
  random_state ^= random_state >> 17;
  random_state ^= random_state << 5;
  return random_state;
}

void fiber_main() {
  msl_kernel(launch->arguments, &current->thread);
  current->state = State::done;
  leave_fiber();
  __builtin_unreachable();
}

void resume(Fiber& fiber) {
  current = &fiber;
  msl_switch_stack(&scheduler_stack, fiber.stack_pointer);
  current = nullptr;
}

bool same_place(const Fiber& a, const Fiber& b) {
  return !strcmp(a.operation, b.operation) && a.site.line == b.site.line &&
         a.site.column == b.site.column && !strcmp(a.site.file, b.site.file);
}

// "32 threads from 0: threadgroup_barrier at k.source:3; 32 threads from 32: finished".
struct Places {
  char text[300] = "";
  Places(uint32_t low, uint32_t high) {
    bool listed[kMaxThreads] = {};
    size_t length = 0;
    for (uint32_t i = low; i < high && length < sizeof text; i++) {
      if (listed[i]) continue;
      const bool done = fibers[i].state == State::done;
      uint32_t count = 0;
      for (uint32_t j = i; j < high; j++) {
        const bool same =
            (fibers[j].state == State::done) == done && (done || same_place(fibers[i], fibers[j]));
        if (same && !listed[j]) listed[j] = true, count++;
      }
      const char* separator = length ? "; " : "";
      char* end = text + length;
      const size_t room = sizeof text - length;
      length += done ? snprintf(end, room, "%s%u threads from %u: finished", separator, count, i)
                     : snprintf(end, room, "%s%u threads from %u: %s at %s:%d", separator, count, i,
                                fibers[i].operation, fibers[i].site.file, fibers[i].site.line);
    }
  }
};

// Reports at a fiber's place, and ends the launch.
void end_at(Fiber& fiber, const char* kind, const char* what, uint32_t low, uint32_t high) {
  const Places places(low, high);
  current = &fiber;
  find(kind, fiber.site.file, fiber.site.line, 0, 0, "%s: %s", what, places.text);
  current = nullptr;
  aborted = true;
}

void pass_fences(uint32_t fences, Simdgroup& simdgroup) {
  if (fences & kFenceThreadgroup) simdgroup.fence_time[threadgroup_space] = now;
  if (fences & kFenceDevice) simdgroup.fence_time[device_space] = now;
}

// Lets a simdgroup pass the operation at which all its live lanes wait. False: none waits.
bool pass_simd_operation(uint32_t index, uint32_t low, uint32_t high) {
  Fiber* first = nullptr;
  bool together = true;
  for (uint32_t i = low; i < high; i++) {
    if (fibers[i].state == State::at_simd_operation && !first) first = &fibers[i];
  }
  if (!first) return false;
  Simdgroup& simdgroup = simdgroups[index];
  uint32_t active = 0;
  for (uint32_t i = low; i < high; i++) {
    Fiber& fiber = fibers[i];
    if (fiber.state == State::done) continue;
    if (fiber.state != State::at_simd_operation || !same_place(fiber, *first)) {
      together = false;
      continue;
    }
    if (first->uniform && fiber.argument != first->argument) {
      current = &fiber;
      find("simd-argument", fiber.site.file, fiber.site.line, 0, 0,
           "the argument of %s must be the same in all lanes, but is %u here and %u in another",
           fiber.operation, fiber.argument, first->argument);
      current = nullptr;
    }
    active |= 1u << (i - low);
    memcpy(simdgroup.values[i - low], fiber.value, kSimdValueBytes);
  }
  if (!together) {
    end_at(*first, "simd-divergence", "the lanes of a simdgroup are at different places", low,
           high);
    return false;
  }
  report->simd_operations++;
  now++;
  pass_fences(first->fences, simdgroup);
  for (uint32_t i = low; i < high; i++) {
    if (fibers[i].state == State::done) continue;
    fibers[i].active = active;
    fibers[i].state = State::ready;
  }
  return true;
}

// Runs a simdgroup until all its threads are done or at a threadgroup's barrier.
void run_simdgroup(uint32_t index) {
  const uint32_t low = index * kSimdWidth;
  const uint32_t high = low + kSimdWidth < thread_count ? low + kSimdWidth : thread_count;
  const uint32_t lanes = high - low;
  const uint32_t shift = launch->order == shuffled ? next_random() % lanes : 0;
  do {
    for (uint32_t k = 0; k < lanes; k++) {
      const uint32_t lane = launch->order == reverse ? lanes - 1 - k : (k + shift) % lanes;
      if (fibers[low + lane].state != State::ready) continue;
      resume(fibers[low + lane]);
      if (aborted) return;
    }
  } while (pass_simd_operation(index, low, high) && !aborted);
}

// Lets the threadgroup pass the barrier at which all its threads wait. False: it is at an end.
bool pass_barrier(uint32_t simdgroup_count) {
  Fiber* first = nullptr;
  for (uint32_t i = 0; i < thread_count && !first; i++)
    if (fibers[i].state == State::at_barrier) first = &fibers[i];
  if (!first) return false;
  for (uint32_t i = 0; i < thread_count; i++) {
    if (fibers[i].state == State::at_barrier && same_place(fibers[i], *first)) continue;
    end_at(*first, "barrier-divergence", "the threads of a threadgroup are at different places", 0,
           thread_count);
    return false;
  }
  report->barriers++;
  now++;
  if (first->fences & kFenceThreadgroup) barrier_time[threadgroup_space] = now;
  if (first->fences & kFenceDevice) barrier_time[device_space] = now;
  for (uint32_t i = 0; i < simdgroup_count; i++) pass_fences(first->fences, simdgroups[i]);
  for (uint32_t i = 0; i < thread_count; i++) fibers[i].state = State::ready;
  return true;
}

uint32_t simdgroups_of(uint32_t threads) {
  return (threads + kSimdWidth - 1) / kSimdWidth;
}

void start_threads(const uint32_t group[3], const uint32_t groups[3], const uint32_t size[3]) {
  const uint32_t* full = launch->threadgroup;
  for (uint32_t i = 0; i < thread_count; i++) {
    Fiber& fiber = fibers[i];
    msl_thread& thread = fiber.thread;
    const uint32_t position[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
    for (int k = 0; k < 3; k++) {
      thread.position_in_threadgroup[k] = position[k];
      thread.threadgroup_position[k] = group[k];
      thread.position_in_grid[k] = group[k] * full[k] + position[k];
      thread.threads_per_threadgroup[k] = size[k];
      thread.dispatch_threads_per_threadgroup[k] = full[k];
      thread.threads_per_grid[k] = launch->grid[k];
      thread.threadgroups_per_grid[k] = groups[k];
    }
    thread.index = i;
    thread.lane = i % kSimdWidth;
    thread.simdgroup = i / kSimdWidth;
    thread.simdgroups = simdgroups_of(thread_count);
    thread.dispatch_simdgroups = simdgroups_of(full[0] * full[1] * full[2]);
    fiber.state = State::ready;
    fiber.operation = "";
    fiber.site = {};
    fiber.stack_pointer = new_stack(fiber.stack_high, fiber_main);
  }
}

}  // namespace

void leave_fiber() {
  msl_switch_stack(&current->stack_pointer, scheduler_stack);
}

void abort_fiber() {
  aborted = true;
  leave_fiber();
  __builtin_unreachable();
}

void run_threadgroup(const uint32_t group[3], const uint32_t groups[3]) {
  uint32_t size[3];
  for (int k = 0; k < 3; k++) {
    const uint32_t left = launch->grid[k] - group[k] * launch->threadgroup[k];
    size[k] = left < launch->threadgroup[k] ? left : launch->threadgroup[k];
  }
  if (!random_state) random_state = launch->seed * 2654435761u + 88172645u;
  thread_count = size[0] * size[1] * size[2];
  const uint32_t count = simdgroups_of(thread_count);
  group_start = ++now;
  for (int space = 0; space < space_count; space++) {
    barrier_time[space] = group_start;
    for (uint32_t i = 0; i < count; i++) simdgroups[i].fence_time[space] = group_start;
  }
  memset(reinterpret_cast<void*>(threadgroup_low), 0xff, threadgroup_high - threadgroup_low);
  start_threads(group, groups, size);
  uint32_t order[kMaxThreads / kSimdWidth];
  for (uint32_t i = 0; i < count; i++) order[i] = launch->order == reverse ? count - 1 - i : i;
  do {
    for (uint32_t i = count; launch->order == shuffled && i > 1; i--) {
      const uint32_t j = next_random() % i, moved = order[i - 1];
      order[i - 1] = order[j];
      order[j] = moved;
    }
    for (uint32_t i = 0; i < count && !aborted; i++) run_simdgroup(order[i]);
  } while (!aborted && pass_barrier(count));
}

}  // namespace msl

using namespace msl;

extern "C" uint32_t msl_lane() {
  return current->thread.lane;
}

extern "C" void msl_simd_operation(const char* name, const void* value, uint32_t bytes,
                                   uint32_t argument, int uniform, msl_site site,
                                   msl_simd_values* values) {
  Fiber* fiber = current;
  memcpy(fiber->value, value, bytes);
  fiber->operation = name;
  fiber->argument = argument;
  fiber->uniform = uniform;
  fiber->site = site;
  fiber->fences = 0;
  fiber->state = State::at_simd_operation;
  leave_fiber();
  *values = {simdgroups[fiber->thread.simdgroup].values[0], fiber->active, fiber->thread.lane};
}

extern "C" void msl_barrier(int simdgroup_only, uint32_t fences, msl_site site) {
  Fiber* fiber = current;
  fiber->operation = simdgroup_only ? "simdgroup_barrier" : "threadgroup_barrier";
  fiber->argument = fences;
  fiber->uniform = 1;
  fiber->site = site;
  fiber->fences = fences;
  fiber->state = simdgroup_only ? State::at_simd_operation : State::at_barrier;
  leave_fiber();
}
