#include "pool.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mlxserve {
namespace {

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// About 50 us: longer than the gap between two kernels of a step, shorter than anyone would notice.
constexpr int SPINS = 1200;

struct Pool {
  // Even: no job. Odd: a job is open. A worker that enters counts itself in `inside` and then looks
  // again: either it still sees the job, or the caller, who closes first and then waits for
  // `inside` to be 0, sees it. So a worker that sleeps or is slow to wake is never waited for.
  std::atomic<uint32_t> generation{0};
  std::atomic<int> inside{0};
  std::atomic<int64_t> next{0};
  int64_t items{0}, grain{1};
  void (*work)(const void*, int64_t, int64_t){nullptr};
  const void* context{nullptr};
  std::mutex one_job;

  explicit Pool(int threads) {
    try {
      for (int i = 1; i < threads; i++) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      // The system allows no more of them: the work is done by those that there are.
    }
  }

  void take_ranges() {
    for (;;) {
      const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= items) return;
      work(context, begin, begin + grain < items ? begin + grain : items);
    }
  }

  void serve() {
    uint32_t seen = 0;
    for (;;) {
      for (int i = 0; i < SPINS && generation.load() == seen; i++) relax();
      generation.wait(seen);
      const uint32_t now = generation.load();
      if (now % 2) {
        inside.fetch_add(1);
        if (generation.load() == now) take_ranges();
        inside.fetch_sub(1);
      }
      seen = now;
    }
  }

  void run(int64_t items_, int64_t grain_, void (*work_)(const void*, int64_t, int64_t),
           const void* context_) {
    std::lock_guard<std::mutex> lock(one_job);
    items = items_, grain = grain_, work = work_, context = context_;
    next.store(0, std::memory_order_relaxed);
    generation.fetch_add(1);
    generation.notify_all();
    // Also where the work throws: nobody may be left inside a job whose context is gone.
    struct Close {
      Pool& pool;
      ~Close() { pool.close(); }
    } const closing{*this};
    take_ranges();
  }

  void close() {
    generation.fetch_add(1);
    for (int i = 0; inside.load(); i++) {
      if (i < SPINS) relax();
      else std::this_thread::yield();
    }
  }
};

std::atomic<int> wanted{0};

// Never destroyed: its threads wait for work until the process ends.
Pool& pool() {
  static Pool* const instance = new Pool(threads());
  return *instance;
}

}  // namespace

void set_threads(int threads) {
  wanted = threads;
}

int threads() {
  const int n = wanted.load();
  return n > 0 ? n : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void parallel_for(int64_t items, int64_t grain, void (*work)(const void*, int64_t, int64_t),
                  const void* context) {
  if (items <= 0) return;
  if (items <= grain) return work(context, 0, items);
  pool().run(items, grain, work, context);
}

}  // namespace mlxserve
