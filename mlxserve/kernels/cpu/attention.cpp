// Spreads a step's attention over the threads. How it is cut doesn't change any result.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace mlxserve {
namespace {

// Below so many multiply-adds, waking a thread takes longer than it saves.
constexpr int64_t SMALL = 1 << 16;
// Floats of partials at once: longer texts are done in several rounds, so memory stays bounded.
constexpr int64_t PARTIALS_AT_ONCE = 2 << 20;

// A part with too many blocks for one thread: partials per block, merged afterwards.
struct Split {
  AttentionPart part;
  int64_t states_at;
  int32_t next;  // the first block that isn't done
};

struct Job {
  AttentionPart part;
  float* partials;
};

struct Merge {
  AttentionPart part;
  const float* partials;
  float* states;
  bool first, last;
  int query;
};

float* scratch(int64_t floats) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats) memory.resize(floats);
  return memory.data();
}

// Few queries wait for memory: a block costs the same for one and for eight.
int64_t block_cost(const AttentionPart& part) {
  return std::max(part.queries(), 8);
}
int64_t cost(const AttentionPart& part) {
  return block_cost(part) * (part.block_end - part.block_begin);
}

int64_t pages_in(int64_t tokens, const Attention& a) {
  return (tokens + a.page_tokens - 1) / a.page_tokens;
}

std::vector<AttentionPart> parts_of(const Attention& a, int n_rows) {
  std::vector<AttentionPart> parts;
  for (int32_t r = 0; r < n_rows; r++) {
    const PagedRow& row = a.rows[r];
    const int32_t queries = row.n * a.group();
    for (int32_t begin = 0; begin < queries; begin += PART_QUERIES) {
      const int32_t end = std::min(queries, begin + PART_QUERIES);
      const int64_t oldest = row.start + begin / a.group();
      const int64_t newest = row.start + (end - 1) / a.group();
      const auto kept = static_cast<int32_t>(pages_in(std::min(a.keep, newest + 1), a));
      const auto window = static_cast<int32_t>(a.low(oldest) / a.page_tokens);
      const auto after = static_cast<int32_t>(pages_in(newest + 1, a));
      const int32_t blocks = kept + std::max(0, after - window);
      for (int32_t head = 0; head < a.kv_heads; head++)
        parts.push_back({r, head, begin, end, kept, window, 0, blocks});
    }
  }
  return parts;
}

void run_jobs(const Attention& a, const std::vector<Job>& jobs, bool small) {
  const auto count = static_cast<int64_t>(jobs.size());
  parallel_for(count, small ? count : 1, [&](int64_t begin, int64_t end) {
    float* const memory = scratch(scratch_floats(a));
    for (int64_t i = begin; i < end; i++)
      kernels().attend(a, jobs[i].part, jobs[i].partials, memory);
  });
}

void run_merges(const Attention& a, const std::vector<Merge>& merges) {
  const auto count = static_cast<int64_t>(merges.size());
  parallel_for(
      count, std::max<int64_t>(1, count / (8 * threads())), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
          const Merge& m = merges[i];
          kernels().merge(a, m.part, m.partials, m.states, m.first, m.last, m.query, m.query + 1);
        }
      });
}

// As many blocks as there is room for, of as many splits; false once all are done.
bool next_round(const Attention& a, std::vector<Split>& splits, int64_t piece, float* room,
                float* states, std::vector<Job>& jobs, std::vector<Merge>& merges) {
  int64_t left = PARTIALS_AT_ONCE;
  for (Split& split : splits) {
    const AttentionPart& whole = split.part;
    const int64_t per_block = whole.queries() * partial_floats(a);
    const auto blocks =
        static_cast<int32_t>(std::min<int64_t>(whole.block_end - split.next, left / per_block));
    if (blocks <= 0) continue;
    AttentionPart now = whole;
    now.block_begin = split.next;
    now.block_end = split.next + blocks;
    const auto step = static_cast<int32_t>(std::max<int64_t>(1, piece / block_cost(whole)));
    for (int32_t block = now.block_begin; block < now.block_end; block += step) {
      AttentionPart some = now;
      some.block_begin = block;
      some.block_end = std::min(now.block_end, block + step);
      jobs.push_back({some, room + (block - now.block_begin) * per_block});
    }
    for (int query = 0; query < whole.queries(); query++)
      merges.push_back({now, room, states + split.states_at, split.next == whole.block_begin,
                        now.block_end == whole.block_end, query});
    split.next = now.block_end;
    room += blocks * per_block;
    left -= blocks * per_block;
  }
  return !jobs.empty();
}

}  // namespace

void run_attention(const Attention& a, int n_rows) {
  std::vector<AttentionPart> parts = parts_of(a, n_rows);
  std::stable_sort(parts.begin(), parts.end(),
                   [](const auto& x, const auto& y) { return cost(x) > cost(y); });
  int64_t total = 0;
  for (const auto& part : parts) total += cost(part);
  const bool small = total * a.page_tokens * a.dim < SMALL;
  std::vector<Job> jobs;
  std::vector<Split> splits;
  int64_t state_floats = 0;
  for (const auto& part : parts) {
    if (threads() == 1 || small || cost(part) * threads() * 4 <= total ||
        part.queries() * partial_floats(a) > PARTIALS_AT_ONCE) {
      jobs.push_back({part, nullptr});
    } else {
      splits.push_back({part, state_floats, part.block_begin});
      state_floats += part.queries() * partial_floats(a);
    }
  }
  if (splits.empty()) return run_jobs(a, jobs, small);
  thread_local std::vector<float> room, states;
  int64_t wanted = 0;
  for (const auto& split : splits)
    wanted += (split.part.block_end - split.next) * split.part.queries() * partial_floats(a);
  wanted = std::min(wanted, PARTIALS_AT_ONCE);
  if (static_cast<int64_t>(room.size()) < wanted) room.resize(wanted);
  if (static_cast<int64_t>(states.size()) < state_floats) states.resize(state_floats);
  std::vector<Merge> merges;
  const int64_t piece = total / (16 * threads());
  while (next_round(a, splits, piece, room.data(), states.data(), jobs, merges)) {
    run_jobs(a, jobs, false);
    run_merges(a, merges);
    jobs.clear();
    merges.clear();
  }
}

}  // namespace mlxserve
