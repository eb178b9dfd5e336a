// Checks of every access to memory: bounds, read-only memory, initialisation, races.
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "state.h"

namespace msl {
namespace {

// Of a byte. Threads count from 1, so that 0 is none.
struct Cell {
  uint32_t writer, write_time, write_pc;
  uint32_t reader, read_time, read_pc;
};
constexpr uint32_t kAtomic = 0x40000000u;           // with a writer
constexpr uint32_t kReadBySimdgroup = 0x80000000u;  // with a simdgroup, as a reader
constexpr uint32_t kReadByMany = 0xffffffffu;
constexpr uint32_t kRedzoneBytes = 64, kMaxRedzones = 64;

Cell* threadgroup_cells;
Cell* buffer_cells[kMaxBuffers];
uintptr_t redzones[kMaxRedzones];
uint32_t redzone_count;

struct Access {
  uintptr_t address;
  uint32_t bytes;
  bool read, write, atomic;
  uintptr_t pc;
  const char* verb() const { return write ? "write" : "read"; }
};

// What an access touches: part of threadgroup memory or of an output.
struct Target {
  Space space;
  const char* name;
  uint64_t offset;
  uint32_t element_bytes;
  unsigned long long element(uint32_t byte) const { return (offset + byte) / element_bytes; }
  const char* race() const { return space == device_space ? "device-race" : "threadgroup-race"; }
};

Cell* new_cells(uint64_t count) {
  void* cells = mmap(nullptr, (count + 1) * sizeof(Cell), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return cells == MAP_FAILED ? nullptr : static_cast<Cell*>(cells);
}

// Whether what a thread of this threadgroup did is ordered before the current thread.
bool ordered(uint32_t thread, uint32_t time, Space space) {
  const uint32_t simdgroup = current->thread.simdgroup;
  return thread == current->thread.index || time < barrier_time[space] ||
         (thread / kSimdWidth == simdgroup && time < simdgroups[simdgroup].fence_time[space]);
}

bool readers_ordered(const Cell& cell, Space space) {
  if (cell.reader == kReadByMany) return cell.read_time < barrier_time[space];
  if (!(cell.reader & kReadBySimdgroup)) return ordered(cell.reader - 1, cell.read_time, space);
  const uint32_t simdgroup = cell.reader & ~kReadBySimdgroup;
  return cell.read_time < barrier_time[space] ||
         (simdgroup == current->thread.simdgroup &&
          cell.read_time < simdgroups[simdgroup].fence_time[space]);
}

void add_reader(Cell& cell, Space space) {
  const uint32_t me = current->thread.index + 1, simdgroup = current->thread.simdgroup;
  if (cell.reader == 0 || cell.read_time < group_start || cell.read_time < barrier_time[space]) {
    cell.reader = me;
  } else if (cell.reader != kReadByMany && cell.reader != me) {
    const bool one = !(cell.reader & kReadBySimdgroup);
    const uint32_t other = one ? (cell.reader - 1) / kSimdWidth : cell.reader & ~kReadBySimdgroup;
    cell.reader = other == simdgroup ? kReadBySimdgroup | simdgroup : kReadByMany;
  }
}

// Whether the byte's last write may be before this access; reports what is wrong.
bool check_last_write(const Cell& cell, const Access& access, const Target& target, uint32_t byte) {
  const bool written = cell.writer != 0;
  const bool by_this_group = written && cell.write_time >= group_start;
  const bool by_another = written && !by_this_group && target.space == device_space;
  if (access.read && !by_this_group && !by_another) {
    find("uninitialised-read", nullptr, 0, access.pc, 0, "read of %s[%llu], which nothing wrote",
         target.name, target.element(byte));
    return false;
  }
  if (access.atomic && (cell.writer & kAtomic)) return true;
  if (by_another) {
    find("device-race", nullptr, 0, access.pc, cell.write_pc,
         "%s of %s[%llu] conflicts with a write by another threadgroup", access.verb(), target.name,
         target.element(byte));
    return false;
  }
  const uint32_t writer = (cell.writer & ~kAtomic) - 1;
  if (by_this_group && !ordered(writer, cell.write_time, target.space)) {
    find(target.race(), nullptr, 0, access.pc, cell.write_pc,
         "%s of %s[%llu] by thread %u races with a write by thread %u: no barrier with mem_%s "
         "between",
         access.verb(), target.name, target.element(byte), current->thread.index, writer,
         target.space == device_space ? "device" : "threadgroup");
    return false;
  }
  return true;
}

bool check_last_reads(const Cell& cell, const Access& access, const Target& target, uint32_t byte) {
  if (cell.reader == 0) return true;
  const bool by_this_group = cell.read_time >= group_start;
  if (!by_this_group && target.space == threadgroup_space) return true;
  if (by_this_group && readers_ordered(cell, target.space)) return true;
  find(target.race(), nullptr, 0, access.pc, cell.read_pc,
       "write of %s[%llu] by thread %u races with an earlier read by another %s", target.name,
       target.element(byte), current->thread.index,
       by_this_group ? "thread: no barrier between" : "threadgroup");
  return false;
}

void check_cells(Cell* cells, const Access& access, const Target& target) {
  const uint32_t pc = uint32_t(access.pc - module_low);
  for (uint32_t i = 0; i < access.bytes; i++) {
    Cell& cell = cells[i];
    if (!check_last_write(cell, access, target, i)) return;
    if (access.write) {
      if (!check_last_reads(cell, access, target, i)) return;
      cell.writer = (current->thread.index + 1) | (access.atomic ? kAtomic : 0);
      cell.write_time = now;
      cell.write_pc = pc;
      if (!access.atomic) cell.reader = 0;
    } else if (!access.atomic) {
      add_reader(cell, target.space);
      cell.read_time = now;
      cell.read_pc = pc;
    }
  }
}

void check_threadgroup_access(const Access& access) {
  for (uint32_t i = 0; i < redzone_count; i++) {
    if (access.address + access.bytes > redzones[i] &&
        access.address < redzones[i] + kRedzoneBytes) {
      find("threadgroup-bounds", nullptr, 0, access.pc, 0,
           "%s of %u bytes just outside a threadgroup array", access.verb(), access.bytes);
      abort_fiber();
    }
  }
  const uint64_t offset = access.address - threadgroup_low;
  if (access.read) record_threadgroup_access(access.bytes, false);
  if (access.write) record_threadgroup_access(access.bytes, true);
  check_cells(threadgroup_cells + offset, access,
              {threadgroup_space, "threadgroup memory, byte ", offset, 1});
}

void check_buffer_access(uint32_t index, const Access& access) {
  const msl_buffer& buffer = launch->buffers[index];
  if (access.write && !buffer.writable) {
    find("read-only", nullptr, 0, access.pc, 0, "write to the input '%s'", buffer.name);
    abort_fiber();
  }
  if (access.read) record_access(index, access.address, access.bytes, false, access.pc);
  if (access.write) record_access(index, access.address, access.bytes, true, access.pc);
  if (!buffer.writable) return;
  const uint64_t offset = access.address - reinterpret_cast<uintptr_t>(buffer.base);
  check_cells(buffer_cells[index] + offset, access,
              {device_space, buffer.name, offset, buffer.element_bytes});
}

// An access outside of everything: named by the nearest buffer.
[[noreturn]] void report_wild_access(const Access& access) {
  for (uint32_t i = 0; i < thread_count; i++) {
    if (access.address >= reinterpret_cast<uintptr_t>(fibers[i].stack_low) &&
        access.address < reinterpret_cast<uintptr_t>(fibers[i].stack_high)) {
      find("foreign-private", nullptr, 0, access.pc, 0, "%s of private memory of thread %u",
           access.verb(), i);
      abort_fiber();
    }
  }
  const msl_buffer* nearest = nullptr;
  uint64_t nearest_distance = UINT64_MAX;
  for (uint32_t i = 0; i < launch->buffer_count; i++) {
    const uintptr_t low = reinterpret_cast<uintptr_t>(launch->buffers[i].base);
    const uintptr_t high = low + launch->buffers[i].bytes, end = access.address + access.bytes;
    const uint64_t distance = access.address < low ? low - access.address : end - high;
    if (distance < nearest_distance) {
      nearest_distance = distance;
      nearest = &launch->buffers[i];
    }
  }
  if (nearest) {
    const int64_t size = nearest->element_bytes;
    const int64_t offset = int64_t(access.address) - int64_t(nearest->base);
    const int64_t element = offset >= 0 ? offset / size : -((size - 1 - offset) / size);
    find(
        "device-bounds", nullptr, 0, access.pc, 0,
        "%s of %u bytes outside of every buffer; the nearest is '%s' with %llu elements, at [%lld]",
        access.verb(), access.bytes, nearest->name,
        static_cast<unsigned long long>(nearest->bytes / size), static_cast<long long>(element));
  } else {
    find("device-bounds", nullptr, 0, access.pc, 0, "%s of %u bytes where no memory is",
         access.verb(), access.bytes);
  }
  abort_fiber();
}

void check(const Access& access) {
  if (!current || access.bytes == 0) return;
  const uintptr_t low = access.address, high = low + access.bytes;
  if (low >= reinterpret_cast<uintptr_t>(current->stack_low) &&
      high <= reinterpret_cast<uintptr_t>(current->stack_high))
    return;
  if (low >= threadgroup_low && high <= threadgroup_high) return check_threadgroup_access(access);
  for (uint32_t i = 0; i < launch->buffer_count; i++) {
    const uintptr_t base = reinterpret_cast<uintptr_t>(launch->buffers[i].base);
    if (low >= base && high <= base + launch->buffers[i].bytes)
      return check_buffer_access(i, access);
  }
  const bool constant = low >= module_low && high <= module_high;  // at program scope
  if (constant && !access.write) return;
  report_wild_access(access);
}

void check_read(const void* address, uint64_t bytes, uintptr_t pc) {
  check({reinterpret_cast<uintptr_t>(address), uint32_t(bytes), true, false, false, pc});
}
void check_write(const void* address, uint64_t bytes, uintptr_t pc) {
  check({reinterpret_cast<uintptr_t>(address), uint32_t(bytes), false, true, false, pc});
}

}  // namespace

void open_shadow() {
  redzone_count = 0;
  threadgroup_cells = new_cells(threadgroup_high - threadgroup_low);
  for (uint32_t i = 0; i < launch->buffer_count; i++) {
    const msl_buffer& buffer = launch->buffers[i];
    buffer_cells[i] = buffer.writable ? new_cells(buffer.bytes) : nullptr;
  }
}

void check_outputs_written() {
  for (uint32_t i = 0; i < launch->buffer_count; i++) {
    const msl_buffer& buffer = launch->buffers[i];
    if (!buffer.writable) continue;
    const uint64_t count = buffer.bytes / buffer.element_bytes;
    uint64_t missing = 0, first = 0;
    for (uint64_t element = 0; element < count; element++) {
      if (buffer_cells[i][element * buffer.element_bytes].writer) continue;
      if (missing++ == 0) first = element;
    }
    if (missing)
      find("unwritten-output", buffer.name, 0, 0, 0,
           "%llu of %llu elements of output '%s' were never written; the first is [%llu]",
           static_cast<unsigned long long>(missing), static_cast<unsigned long long>(count),
           buffer.name, static_cast<unsigned long long>(first));
  }
}

}  // namespace msl

using namespace msl;

extern "C" void msl_check_atomic(const volatile void* pointer, uint32_t bytes, int kind) {
  if (!launch->check) return;
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  const uintptr_t pc = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  if (address % bytes) find("misaligned", nullptr, 0, pc, 0, "misaligned atomic operation");
  check({address, bytes, kind != msl_atomic_store, kind != msl_atomic_load, true, pc});
}

extern "C" void msl_redzone(const void* pointer) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  for (uint32_t i = 0; i < redzone_count; i++)
    if (redzones[i] == address) return;
  if (redzone_count < kMaxRedzones) redzones[redzone_count++] = address;
}

// What clang's -fsanitize=thread calls.
#define PC reinterpret_cast<uintptr_t>(__builtin_return_address(0))
#define HOOKS(prefix, n)                                    \
  extern "C" void __tsan_##prefix##read##n(void* p) {       \
    check_read(p, n, PC);                                   \
  }                                                         \
  extern "C" void __tsan_##prefix##write##n(void* p) {      \
    check_write(p, n, PC);                                  \
  }                                                         \
  extern "C" void __tsan_##prefix##read_write##n(void* p) { \
    check_read(p, n, PC);                                   \
    check_write(p, n, PC);                                  \
  }
#define ALL_HOOKS(n) HOOKS(, n) HOOKS(unaligned_, n)
ALL_HOOKS(1)
ALL_HOOKS(2)
ALL_HOOKS(4)
ALL_HOOKS(8)
ALL_HOOKS(16)
extern "C" void __tsan_init() {}
extern "C" void* __tsan_memcpy(void* to, const void* from, size_t n) {
  check_read(from, n, PC);
  check_write(to, n, PC);
  return memcpy(to, from, n);
}
extern "C" void* __tsan_memmove(void* to, const void* from, size_t n) {
  check_read(from, n, PC);
  check_write(to, n, PC);
  return memmove(to, from, n);
}
extern "C" void* __tsan_memset(void* to, int value, size_t n) {
  check_write(to, n, PC);
  return memset(to, value, n);
}
