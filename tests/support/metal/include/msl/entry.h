// What the generated entry point uses: arguments of any pointer type, attributes, and memory for
// the variables of a threadgroup.
#pragma once
#include "msl/vector.h"

struct msl_pointer {
  void* address;
  template <typename T>
  MSL_INLINE operator T*() const {
    return static_cast<T*>(address);
  }
};
struct msl_reference {
  void* address;
  template <typename T>
  MSL_INLINE operator T&() const {
    return *static_cast<T*>(address);
  }
};
MSL_INLINE uint3 msl_uint3(const uint32_t* x) {
  return uint3(x[0], x[1], x[2]);
}
MSL_INLINE uint msl_quads(const uint32_t* size) {
  return (size[0] * size[1] * size[2] + 3) / 4;
}

// `threadgroup T x[...];` in a body. One threadgroup runs at a time, so a static variable is enough;
// `used` keeps it, and tells the compiler that others see it. All lie in one section, which the
// runtime fills before each threadgroup. With checks, memory that no one may touch precedes each.
#define MSL_STATIC static __attribute__((used, section("msl_threadgroup"), aligned(16)))
#ifdef MSL_CHECK
#define MSL_JOIN_(a, b) a##b
#define MSL_JOIN(a, b) MSL_JOIN_(a, b)
#define MSL_THREADGROUP_NAMED(redzone) \
  MSL_STATIC char redzone[64];         \
  msl_redzone(redzone);                \
  MSL_STATIC
#define MSL_THREADGROUP MSL_THREADGROUP_NAMED(MSL_JOIN(msl_redzone_, __COUNTER__))
#else
#define MSL_THREADGROUP MSL_STATIC
#endif
