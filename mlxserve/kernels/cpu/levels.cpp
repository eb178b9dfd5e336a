#include <string_view>

#include "kernels.h"

namespace mlxserve {
namespace {

bool can_run(const Kernels& level) {
#if defined(__x86_64__)
  if (&level == &kernels_avx512vnni)
    return can_run(kernels_avx512) && __builtin_cpu_supports("avx512vnni");
  if (&level == &kernels_avx512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (&level == &kernels_avx2)
    // Whatever has AVX2 and FMA has F16C, which older clangs don't know how to ask for.
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return &level == &kernels_portable;
}

const Kernels* const levels[] = {&kernels_avx512vnni, &kernels_avx512, &kernels_avx2,
                                 &kernels_portable};

const Kernels* best() {
  for (const Kernels* level : levels)
    if (can_run(*level)) return level;
  return &kernels_portable;
}

const Kernels* chosen = nullptr;

}  // namespace

const Kernels& kernels() {
  static const Kernels* const automatic = best();
  return chosen ? *chosen : *automatic;
}

bool set_level(const char* name) {
  for (const Kernels* level : levels) {
    if (std::string_view(level->name) == name && can_run(*level)) {
      chosen = level;
      return true;
    }
  }
  return false;
}

}  // namespace mlxserve
