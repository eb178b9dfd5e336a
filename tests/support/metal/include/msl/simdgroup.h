// Barriers, and operations across the lanes of a simdgroup or a quad. Each is a rendezvous in the
// runtime, after which every lane computes its own result from all values.
#pragma once
#include "msl/math.h"

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(uint(a) | uint(b));
}
MSL_INLINE void threadgroup_barrier(mem_flags flags, MSL_SITE) {
  msl_barrier(0, uint(flags), site);
}
MSL_INLINE void simdgroup_barrier(mem_flags flags, MSL_SITE) {
  msl_barrier(1, uint(flags), site);
}

template <typename T>
struct msl_lanes {
  msl_simd_values values;
  MSL_INLINE uint lane() const { return values.lane; }
  MSL_INLINE bool active(uint lane) const { return lane < 32 && (values.active >> lane & 1); }
  MSL_INLINE T operator[](uint lane) const {
    T x;
    __builtin_memcpy(static_cast<void*>(&x), values.data + kSimdValueBytes * lane, sizeof(T));
    return x;
  }
  // The value of a lane that must be active.
  MSL_INLINE T read(uint lane, const char* name, msl_site site) const {
    if (active(lane)) return (*this)[lane];
    msl_error("inactive-lane", name, site);
    T x;
    __builtin_memset(static_cast<void*>(&x), 0xff, sizeof(T));
    return x;
  }
};

template <typename T>
MSL_INLINE msl_lanes<T> msl_gather(const char* name, const T& x, msl_site site) {
  static_assert(sizeof(T) <= kSimdValueBytes, "a simd operation of too large a type");
  msl_lanes<T> lanes;
  msl_simd_operation(name, &x, sizeof(T), 0, 0, site, &lanes.values);
  return lanes;
}
// The same, where an argument must be the same in all lanes.
template <typename T>
MSL_INLINE msl_lanes<T> msl_gather(const char* name, const T& x, msl_site site, uint argument) {
  static_assert(sizeof(T) <= kSimdValueBytes, "a simd operation of too large a type");
  msl_lanes<T> lanes;
  msl_simd_operation(name, &x, sizeof(T), argument, 1, site, &lanes.values);
  return lanes;
}

// The types that Metal has simd operations for.
template <typename T>
struct msl_simd_type : bool_constant<is_arithmetic_v<T> && !is_same_v<T, bool> && sizeof(T) <= 4> {
};
template <typename T, int N>
struct msl_simd_type<vec<T, N>> : msl_simd_type<T> {};
#define MSL_SIMD_TEMPLATE \
  template <typename T, typename = std::enable_if_t<msl_simd_type<T>::value>>

// Kept apart, so that its arithmetic isn't taken for the kernel's: see arithmetic.py.
#define MSL_OWN_FUNCTION __attribute__((noinline))

// A tree in the type itself. Metal promises no order, so MSL_REVERSED_REDUCTIONS makes it a chain
// from the last lane to the first.
template <typename T, typename F>
MSL_OWN_FUNCTION T msl_reduce(const msl_lanes<T>& lanes, F f) {
  T partial[32];
  uint n = 0;
  for (uint lane = 0; lane < 32; lane++)
    if (lanes.active(lane)) partial[n++] = lanes[lane];
#ifdef MSL_REVERSED_REDUCTIONS
  for (; n > 1; n--) partial[n - 2] = f(partial[n - 1], partial[n - 2]);
#else
  for (; n > 1; n = (n + 1) / 2)
    for (uint i = 0; i < n / 2; i++) partial[i] = f(partial[i], partial[n - 1 - i]);
#endif
  return partial[0];
}
#define MSL_REDUCTION(name, expression)                                           \
  MSL_SIMD_TEMPLATE MSL_INLINE T name(T x, MSL_SITE) {                            \
    return msl_reduce(msl_gather(#name, x, site),                                 \
                      [](const T& a, const T& b) -> T { return T(expression); }); \
  }
MSL_REDUCTION(simd_sum, a + b)
MSL_REDUCTION(simd_product, a* b)
MSL_REDUCTION(simd_and, a& b)
MSL_REDUCTION(simd_or, a | b)
MSL_REDUCTION(simd_xor, a ^ b)
MSL_REDUCTION(simd_max, max(a, b))
MSL_REDUCTION(simd_min, min(a, b))
#undef MSL_REDUCTION

// f over the values of the active lanes below `end`, in their order.
template <typename T, typename F>
MSL_OWN_FUNCTION T msl_scan(const msl_lanes<T>& lanes, uint end, T x, F f) {
  for (uint lane = 0; lane < end; lane++)
    if (lanes.active(lane)) x = f(x, lanes[lane]);
  return x;
}
#define MSL_PREFIX(name, expression, included, start)                           \
  MSL_SIMD_TEMPLATE MSL_INLINE T name(T x, MSL_SITE) {                          \
    const auto lanes = msl_gather(#name, x, site);                              \
    return msl_scan(lanes, lanes.lane() + included, T(start),                   \
                    [](const T& a, const T& b) -> T { return T(expression); }); \
  }
MSL_PREFIX(simd_prefix_inclusive_sum, a + b, 1, 0)
MSL_PREFIX(simd_prefix_exclusive_sum, a + b, 0, 0)
MSL_PREFIX(simd_prefix_inclusive_product, a* b, 1, 1)
MSL_PREFIX(simd_prefix_exclusive_product, a* b, 0, 1)
#undef MSL_PREFIX

MSL_SIMD_TEMPLATE MSL_INLINE T simd_shuffle(T x, ushort lane, MSL_SITE) {
  return msl_gather("simd_shuffle", x, site).read(lane, "simd_shuffle", site);
}
// Reads the lane `source`, an expression of `lane` and of `n`, which is the same in all lanes.
#define MSL_SHUFFLE(name, source, own)                           \
  MSL_SIMD_TEMPLATE MSL_INLINE T name(T x, ushort n, MSL_SITE) { \
    const auto lanes = msl_gather(#name, x, site, n);            \
    const uint lane = lanes.lane();                              \
    return (own) ? x : lanes.read(source, #name, site);          \
  }
MSL_SHUFFLE(simd_shuffle_xor, lane ^ n, false)
MSL_SHUFFLE(simd_shuffle_down, lane + n, lane + n >= 32)
MSL_SHUFFLE(simd_shuffle_up, lane - n, lane < n)
MSL_SHUFFLE(simd_shuffle_rotate_down, (lane + n) % 32, false)
MSL_SHUFFLE(simd_shuffle_rotate_up, (lane - n) % 32, false)
MSL_SHUFFLE(simd_broadcast, n + 0 * lane, false)
MSL_SHUFFLE(quad_shuffle_xor, lane ^ (n & 3), false)
MSL_SHUFFLE(quad_broadcast, (lane & ~3u) + n, false)
#undef MSL_SHUFFLE

MSL_SIMD_TEMPLATE MSL_INLINE T simd_shuffle_and_fill_up(T x, T fill, ushort n, MSL_SITE) {
  const auto lanes = msl_gather("simd_shuffle_and_fill_up", x, site, n);
  const auto fills = msl_gather("simd_shuffle_and_fill_up", fill, site);
  const uint lane = lanes.lane();
  return lane >= n ? lanes.read(lane - n, "simd_shuffle_and_fill_up", site)
                   : fills.read(32 - n + lane, "simd_shuffle_and_fill_up", site);
}
MSL_SIMD_TEMPLATE MSL_INLINE T simd_shuffle_and_fill_down(T x, T fill, ushort n, MSL_SITE) {
  const auto lanes = msl_gather("simd_shuffle_and_fill_down", x, site, n);
  const auto fills = msl_gather("simd_shuffle_and_fill_down", fill, site);
  const uint lane = lanes.lane();
  return lane + n < 32 ? lanes.read(lane + n, "simd_shuffle_and_fill_down", site)
                       : fills.read(lane + n - 32, "simd_shuffle_and_fill_down", site);
}
MSL_SIMD_TEMPLATE MSL_INLINE T simd_broadcast_first(T x, MSL_SITE) {
  const auto lanes = msl_gather("simd_broadcast_first", x, site);
  return lanes[__builtin_ctz(lanes.values.active)];
}
MSL_SIMD_TEMPLATE MSL_INLINE T quad_sum(T x, MSL_SITE) {
  const auto lanes = msl_gather("quad_sum", x, site);
  const uint first = lanes.lane() & ~3u;
  return T(T(lanes[first] + lanes[first + 1]) + T(lanes[first + 2] + lanes[first + 3]));
}
MSL_SIMD_TEMPLATE MSL_INLINE T quad_max(T x, MSL_SITE) {
  const auto lanes = msl_gather("quad_max", x, site);
  const uint first = lanes.lane() & ~3u;
  return max(max(lanes[first], lanes[first + 1]), max(lanes[first + 2], lanes[first + 3]));
}

// A bit for each active lane where x is true.
MSL_INLINE uint msl_vote(const char* name, bool x, msl_site site) {
  const auto lanes = msl_gather(name, x, site);
  uint votes = 0;
  for (uint lane = 0; lane < 32; lane++)
    if (lanes.active(lane) && lanes[lane]) votes |= 1u << lane;
  return votes;
}
MSL_INLINE bool simd_any(bool x, MSL_SITE) {
  return msl_vote("simd_any", x, site) != 0;
}
MSL_INLINE bool simd_all(bool x, MSL_SITE) {
  return msl_vote("simd_all", !x, site) == 0;
}
struct simd_vote {
  typedef ulong vote_t;
  vote_t votes;
  explicit simd_vote(vote_t x = 0) : votes(x) {}
  explicit operator vote_t() const { return votes; }
};
MSL_INLINE simd_vote simd_ballot(bool x, MSL_SITE) {
  return simd_vote(msl_vote("simd_ballot", x, site));
}
MSL_INLINE bool simd_is_first(MSL_SITE) {
  const auto lanes = msl_gather("simd_is_first", true, site);
  return lanes.lane() == uint(__builtin_ctz(lanes.values.active));
}

}  // namespace metal
