// Atomic operations, relaxed, which is the only order that Metal has for device memory.
#pragma once
#include "msl/types.h"

namespace metal {

enum memory_order { memory_order_relaxed };

template <typename T>
struct atomic {
  static_assert(is_same_v<T, int> || is_same_v<T, uint> || is_same_v<T, bool> ||
                    is_same_v<T, ulong> || is_same_v<T, float>,
                "Metal has atomic<T> of int, uint, bool, ulong and float only");
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;

// Keeps a parameter from being deduced, so that its argument is converted.
template <typename T>
struct msl_same {
  using type = T;
};

// The checks see an atomic access by msl_check_atomic alone.
#define MSL_UNCHECKED __attribute__((no_sanitize("thread"), noinline))
template <typename T>
MSL_UNCHECKED T msl_get(const volatile atomic<T>* p) {
  return p->value;
}
template <typename T>
MSL_UNCHECKED void msl_set(volatile atomic<T>* p, T x) {
  p->value = x;
}

template <typename T>
MSL_INLINE T atomic_load_explicit(const volatile atomic<T>* p, memory_order) {
  msl_check_atomic(p, sizeof(T), msl_atomic_load);
  return msl_get(p);
}
template <typename T>
MSL_INLINE void atomic_store_explicit(volatile atomic<T>* p, typename msl_same<T>::type x,
                                      memory_order) {
  msl_check_atomic(p, sizeof(T), msl_atomic_store);
  msl_set(p, x);
}
#define MSL_UPDATE(name, expression, condition)                                          \
  template <typename T>                                                                  \
  MSL_INLINE T name(volatile atomic<T>* p, typename msl_same<T>::type x, memory_order) { \
    static_assert(condition, "Metal has no " #name " for this type");                    \
    msl_check_atomic(p, sizeof(T), msl_atomic_update);                                   \
    const T old = msl_get(p);                                                            \
    msl_set(p, T(expression));                                                           \
    return old;                                                                          \
  }
#define MSL_SUMMED (!is_same_v<T, bool> && !is_same_v<T, ulong>)
MSL_UPDATE(atomic_exchange_explicit, x, true)
MSL_UPDATE(atomic_fetch_add_explicit, old + x, MSL_SUMMED)
MSL_UPDATE(atomic_fetch_sub_explicit, old - x, MSL_SUMMED)
MSL_UPDATE(atomic_fetch_max_explicit, old < x ? x : old, is_integral_v<T>)
MSL_UPDATE(atomic_fetch_min_explicit, x < old ? x : old, is_integral_v<T>)
MSL_UPDATE(atomic_fetch_and_explicit, old& x, is_integral_v<T>)
MSL_UPDATE(atomic_fetch_or_explicit, old | x, is_integral_v<T>)
MSL_UPDATE(atomic_fetch_xor_explicit, old ^ x, is_integral_v<T>)
#undef MSL_UPDATE
#undef MSL_SUMMED
#undef MSL_UNCHECKED

}  // namespace metal
