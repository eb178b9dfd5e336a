// One pool of threads for all kernels, sized to the cores that this process may use.
#pragma once

#include <cstdint>

namespace mlxserve {

// Calls work(context, begin, end) for disjoint ranges that cover 0 .. items, at most `grain` long,
// on the calling thread and on those of the pool that are free. Returns when all are done. Which
// thread takes which range is left to chance, so a result must not depend on it.
void parallel_for(int64_t items, int64_t grain, void (*work)(const void*, int64_t, int64_t),
                  const void* context);

template <class F>
void parallel_for(int64_t items, int64_t grain, const F& f) {
  parallel_for(
      items, grain,
      [](const void* context, int64_t begin, int64_t end) {
        (*static_cast<const F*>(context))(begin, end);
      },
      &f);
}

// How many threads take part, the caller's among them. The first call of parallel_for fixes it.
void set_threads(int threads);
int threads();

}  // namespace mlxserve
