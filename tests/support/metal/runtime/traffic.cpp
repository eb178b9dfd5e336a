// Counts what threads load and store, and in how many transactions a GPU would.
//
// The lanes of a simdgroup run one after the other here, in step on a GPU: the k-th time that a
// lane comes by an instruction is matched with the k-th time of the other lanes. What they then
// touch together is one access of the simdgroup.
#include <algorithm>
#include <unordered_map>
#include <vector>

#include "state.h"

// What code that counts its arithmetic adds to: see arithmetic.py.
extern "C" {
uint64_t msl_arithmetic;
}

namespace msl {
namespace {

constexpr uint64_t kLineBytes = 128;
enum Touch : uint8_t { loaded = 1, stored = 2 };

// An instruction that accesses a buffer.
struct Instruction {
  uint32_t buffer, bytes;
  bool write;
};
std::vector<Instruction> instructions;
std::unordered_map<uint64_t, uint32_t> instruction_of;  // by pc, buffer, size and direction

struct LaneAccess {
  uint32_t instruction, execution;
  uint64_t offset;  // in its buffer
  bool together(const LaneAccess& other) const {
    return instruction == other.instruction && execution == other.execution;
  }
  bool operator<(const LaneAccess& other) const {
    if (instruction != other.instruction) return instruction < other.instruction;
    if (execution != other.execution) return execution < other.execution;
    return offset < other.offset;
  }
};
struct SimdgroupAccesses {
  std::vector<LaneAccess> accesses;
  std::vector<uint32_t> executions;  // of each instruction by each lane
};
SimdgroupAccesses recorded[kMaxThreads / kSimdWidth];

std::vector<uint8_t> touched[kMaxBuffers];  // of each byte, whether it was loaded and stored

uint32_t find_instruction(uintptr_t pc, uint32_t buffer, uint32_t bytes, bool write) {
  const uint64_t key = (((pc - module_low) * kMaxBuffers + buffer) << 12 | bytes) << 1 | write;
  const auto [entry, is_new] = instruction_of.try_emplace(key, uint32_t(instructions.size()));
  if (is_new) instructions.push_back({buffer, bytes, write});
  return entry->second;
}

// Counts what the lanes from `first` to `last`, sorted by offset, touch together.
void count_access(const LaneAccess* first, const LaneAccess* last) {
  const Instruction& instruction = instructions[first->instruction];
  msl_traffic& traffic = (instruction.write ? report->stores : report->loads)[instruction.buffer];
  uint8_t* bytes_touched = touched[instruction.buffer].data();
  uint64_t distinct = 0, lines = 0, counted_to = 0, next_line = 0;
  for (const LaneAccess* access = first; access != last; access++) {
    const uint64_t end = access->offset + instruction.bytes;
    for (uint64_t i = std::max(access->offset, counted_to); i < end; i++, distinct++)
      bytes_touched[i] |= instruction.write ? stored : loaded;
    counted_to = end;
    const uint64_t line = std::max(access->offset / kLineBytes, next_line);
    const uint64_t end_line = (end - 1) / kLineBytes + 1;
    if (end_line > line) lines += end_line - line, next_line = end_line;
  }
  traffic.bytes += uint64_t(last - first) * instruction.bytes;
  traffic.moved_bytes += distinct;
  traffic.transactions += lines;
  traffic.transactions_needed += (distinct + kLineBytes - 1) / kLineBytes;
}

}  // namespace

void open_traffic() {
  for (uint32_t i = 0; i < launch->buffer_count; i++)
    touched[i].assign(launch->buffers[i].bytes, 0);
}

void record_threadgroup_access(uint32_t bytes, bool write) {
  (write ? report->threadgroup_stored : report->threadgroup_loaded) += bytes;
}

void record_access(uint32_t buffer, uintptr_t address, uint32_t bytes, bool write, uintptr_t pc) {
  if (!launch->count) return;
  SimdgroupAccesses& simdgroup = recorded[current->thread.simdgroup];
  const uint32_t instruction = find_instruction(pc, buffer, bytes, write);
  const uint32_t slot = instruction * kSimdWidth + current->thread.lane;
  if (slot >= simdgroup.executions.size())
    simdgroup.executions.resize(instructions.size() * kSimdWidth);
  const uint64_t offset = address - reinterpret_cast<uintptr_t>(launch->buffers[buffer].base);
  simdgroup.accesses.push_back({instruction, simdgroup.executions[slot]++, offset});
}

void count_threadgroup_traffic() {
  for (SimdgroupAccesses& simdgroup : recorded) {
    std::vector<LaneAccess>& accesses = simdgroup.accesses;
    std::sort(accesses.begin(), accesses.end());
    const LaneAccess *first = accesses.data(), *end = first + accesses.size();
    while (first != end) {
      const LaneAccess* last = first;
      while (last != end && last->together(*first)) last++;
      count_access(first, last);
      first = last;
    }
    accesses.clear();
    simdgroup.executions.clear();
  }
}

void finish_traffic() {
  report->arithmetic = msl_arithmetic;
  for (uint32_t i = 0; i < launch->buffer_count; i++) {
    for (const uint8_t touches : touched[i]) {
      report->loads[i].distinct_bytes += (touches & loaded) != 0;
      report->stores[i].distinct_bytes += (touches & stored) != 0;
    }
  }
}

}  // namespace msl
