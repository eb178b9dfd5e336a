// Matmuls cut into items for the threads: of whole matrices, and of chosen ones out of stacks.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace mlxserve {
namespace {

// Work below this many multiply-adds isn't worth waking a thread for.
constexpr int64_t SMALL = 1 << 15;
constexpr int64_t ROWS_TOGETHER = 128;

// x as the kernels read it: in whole numbers, for each size of group that the weights have, and
// its rows in the order of the product's. The memory is the stream thread's own and kept: as large
// as the largest step needs.
class ReadyX {
 public:
  // rows: [M], which row of x each row of the product takes; null where they are the same.
  void prepare(std::vector<Matmul>& jobs, const int32_t* rows) {
    size_t bytes = 0;
    for (size_t i = 0; i < jobs.size(); i++)
      if (first_of(jobs, i) == i) bytes += bytes_for(jobs[i], rows);
    if (memory_.size() < bytes) memory_.resize(bytes);
    char* at = memory_.data();
    for (size_t i = 0; i < jobs.size(); i++) {
      const size_t first = first_of(jobs, i);
      if (first == i) {
        const size_t taken = bytes_for(jobs[i], rows);
        if (is_whole(jobs[i].w.codec)) convert(jobs[i], rows, at);
        else if (rows) gather(jobs[i], rows, at);
        at += taken;
      } else {
        jobs[i].x = jobs[first].x;
        jobs[i].whole = jobs[first].whole;
      }
    }
  }

 private:
  // The group of whole numbers; 0 for float weights.
  static int group_of(const Matmul& job) { return is_whole(job.w.codec) ? job.w.group : 0; }

  // The first job that reads x in the same form.
  static size_t first_of(const std::vector<Matmul>& jobs, size_t i) {
    size_t first = 0;
    while (group_of(jobs[first]) != group_of(jobs[i])) first++;
    return first;
  }

  static size_t bytes_for(const Matmul& job, const int32_t* rows) {
    const size_t values = job.m * job.w.k;
    if (is_whole(job.w.codec)) return values * 2 + values / job.w.group * 12;
    return rows ? values * 4 : 0;
  }

  // work(row of x, row of the product) for all rows.
  template <class F>
  static void over_rows(const Matmul& job, const int32_t* rows, const F& work) {
    const int64_t k = job.w.k;
    parallel_for(job.m, std::max<int64_t>(1, SMALL / k), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) work(job.x + (rows ? rows[i] : i) * k, i);
    });
  }

  static void convert(Matmul& job, const int32_t* rows, char* at) {
    const int64_t groups = job.m * (job.w.k / job.w.group);
    job.whole.scales = reinterpret_cast<float*>(at);
    job.whole.sums = reinterpret_cast<int32_t*>(at + groups * 4);
    job.whole.totals = reinterpret_cast<float*>(at + groups * 8);
    job.whole.q = reinterpret_cast<int16_t*>(at + groups * 12);
    over_rows(job, rows, [&job](const float* x, int64_t i) {
      kernels().to_whole(x, job.w.k, job.w.group, job.whole, i);
    });
  }

  static void gather(Matmul& job, const int32_t* rows, char* at) {
    auto* const gathered = reinterpret_cast<float*>(at);
    const int64_t k = job.w.k;
    over_rows(job, rows, [=](const float* x, int64_t i) {
      std::memcpy(gathered + i * k, x, k * sizeof(float));
    });
    job.x = gathered;
  }

  std::vector<char> memory_;
};

ReadyX& ready_x() {
  static thread_local ReadyX x;
  return x;
}

// Rows begin .. end of a matmul, against all of its weight.
struct Part {
  Matmul job;
  int64_t begin, end;

  int64_t rows() const { return end - begin; }
  int64_t blocks() const { return (rows() + ROWS_TOGETHER - 1) / ROWS_TOGETHER; }
};

// All panels of all parts, as one list of items for the threads: (a few panels, a block of rows).
void run(const std::vector<Part>& parts) {
  int64_t panels = 0, work = 0;
  for (const auto& part : parts) {
    panels += part.job.w.panels();
    work += part.job.w.n * part.job.w.k * part.rows();
  }
  // Four panels at a time is what one row runs best with.
  const int64_t share = std::max<int64_t>(panels / (threads() * 4) / 4 * 4, 4);
  const auto grain = [share](const Part& part) { return part.rows() == 1 ? share : 1; };
  int64_t items = 0;
  std::vector<int64_t> ends;  // of each part's items
  for (const auto& part : parts)
    ends.push_back(items += (part.job.w.panels() + grain(part) - 1) / grain(part) * part.blocks());
  parallel_for(items, work < SMALL ? items : 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; item++) {
      const size_t i = std::upper_bound(ends.begin(), ends.end(), item) - ends.begin();
      const Part& part = parts[i];
      const int64_t at = item - (i ? ends[i - 1] : 0), step = grain(part);
      const int64_t panel = at / part.blocks() * step,
                    row = part.begin + at % part.blocks() * ROWS_TOGETHER;
      kernels().matmul(part.job, panel, std::min(part.job.w.panels(), panel + step), row,
                       std::min(part.end, row + ROWS_TOGETHER));
    }
  });
}

// The rows of a gathered matmul, sorted by expert.
struct Sorted {
  std::vector<int64_t> begins;   // [experts + 1]: where each expert's rows begin, and the end
  std::vector<int32_t> out;      // the row of the result that each one becomes
  std::vector<int32_t> x;        // the row of x that it takes
  std::vector<int32_t> missing;  // rows of the result whose expert doesn't exist

  explicit Sorted(const Choices& c) : begins(c.experts + 1) {
    const auto exists = [&c](int64_t i) { return c.ids[i] >= 0 && c.ids[i] < c.experts; };
    for (int64_t i = 0; i < c.rows; i++)
      if (exists(i)) begins[c.ids[i] + 1]++;
    for (int64_t e = 0; e < c.experts; e++) begins[e + 1] += begins[e];
    out.resize(begins.back());
    x.resize(begins.back());
    std::vector<int64_t> next(begins.begin(), begins.end() - 1);
    for (int64_t i = 0; i < c.rows; i++) {
      if (!exists(i)) {
        missing.push_back(static_cast<int32_t>(i));
        continue;
      }
      const int64_t at = next[c.ids[i]]++;
      out[at] = static_cast<int32_t>(i);
      x[at] = static_cast<int32_t>(i / c.rows_per_x);
    }
  }
};

}  // namespace

void run_matmul(const Matmul* first, int n_jobs) {
  std::vector<Matmul> jobs(first, first + n_jobs);
  ready_x().prepare(jobs, nullptr);
  std::vector<Part> parts;
  for (const auto& job : jobs) parts.push_back({job, 0, job.m});
  run(parts);
}

void run_gathered_matmul(const Matmul* first, int n_jobs, const Choices& choices) {
  std::vector<Matmul> jobs(first, first + n_jobs);
  const Sorted sorted(choices);
  for (auto& job : jobs) {
    for (const int64_t row : sorted.missing)
      std::fill_n(job.out + row * job.w.n, job.w.n, __builtin_nanf(""));
    job.m = sorted.begins.back();
    job.out_rows = sorted.out.data();
  }
  ready_x().prepare(jobs, sorted.x.data());
  std::vector<Part> parts;
  for (int64_t e = 0; e < choices.experts; e++) {
    const int64_t begin = sorted.begins[e], end = sorted.begins[e + 1];
    if (begin == end) continue;
    for (const auto& job : jobs) {
      Part& part = parts.emplace_back(Part{job, begin, end});
      part.job.w.data += e * job.w.panels() * job.w.panel_bytes();
      if (job.bias) part.job.bias += e * job.w.n;
    }
  }
  run(parts);
}

}  // namespace mlxserve
