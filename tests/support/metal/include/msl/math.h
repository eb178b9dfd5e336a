// Floating-point functions, and min, max, clamp, abs, select for all numbers.
#pragma once
#include "msl/vector.h"

namespace metal {

// A transcendental function of a GPU may be off by some units in the last place. With MSL_ULP_NOISE
// it is off by up to so many here, the same for the same result.
MSL_INLINE float msl_inexact(float x) {
#ifdef MSL_ULP_NOISE
  uint32_t hash = __builtin_bit_cast(uint32_t, x) * 2654435761u;
  hash ^= hash >> 15;
  hash *= 2246822519u;
  hash ^= hash >> 13;
  const int ulps = int(hash % (2 * MSL_ULP_NOISE + 1)) - MSL_ULP_NOISE;
  return x * (1.0f + float(ulps) * 1.1920929e-7f);
#else
  return x;
#endif
}

// Applies f, which is called `name`, to each element.
#define MSL_ELEMENTS1(name)                            \
  template <typename T, int N>                         \
  MSL_INLINE vec<T, N> name(vec<T, N> x) {             \
    vec<T, N> v;                                       \
    for (int i = 0; i < N; i++) v.d[i] = name(x.d[i]); \
    return v;                                          \
  }
#define MSL_ELEMENTS2(name)                                    \
  template <typename T, int N>                                 \
  MSL_INLINE vec<T, N> name(vec<T, N> x, vec<T, N> y) {        \
    vec<T, N> v;                                               \
    for (int i = 0; i < N; i++) v.d[i] = name(x.d[i], y.d[i]); \
    return v;                                                  \
  }
#define MSL_ELEMENTS3(name)                                            \
  template <typename T, int N>                                         \
  MSL_INLINE vec<T, N> name(vec<T, N> x, vec<T, N> y, vec<T, N> z) {   \
    vec<T, N> v;                                                       \
    for (int i = 0; i < N; i++) v.d[i] = name(x.d[i], y.d[i], z.d[i]); \
    return v;                                                          \
  }

#define MSL_FUNCTION1(name, expression) \
  MSL_INLINE float name(float x) {      \
    return expression;                  \
  }                                     \
  MSL_INLINE half name(half x) {        \
    return half(name(float(x)));        \
  }                                     \
  MSL_ELEMENTS1(name)
MSL_FUNCTION1(exp, msl_inexact(__builtin_expf(x)))
MSL_FUNCTION1(exp2, msl_inexact(__builtin_exp2f(x)))
MSL_FUNCTION1(exp10, msl_inexact(__builtin_powf(10.0f, x)))
MSL_FUNCTION1(log, msl_inexact(__builtin_logf(x)))
MSL_FUNCTION1(log2, msl_inexact(__builtin_log2f(x)))
MSL_FUNCTION1(log10, msl_inexact(__builtin_log10f(x)))
MSL_FUNCTION1(sqrt, msl_inexact(__builtin_sqrtf(x)))
MSL_FUNCTION1(rsqrt, msl_inexact(1.0f / __builtin_sqrtf(x)))
MSL_FUNCTION1(sin, msl_inexact(__builtin_sinf(x)))
MSL_FUNCTION1(cos, msl_inexact(__builtin_cosf(x)))
MSL_FUNCTION1(tan, msl_inexact(__builtin_tanf(x)))
MSL_FUNCTION1(sinh, msl_inexact(__builtin_sinhf(x)))
MSL_FUNCTION1(cosh, msl_inexact(__builtin_coshf(x)))
MSL_FUNCTION1(tanh, msl_inexact(__builtin_tanhf(x)))
MSL_FUNCTION1(asin, msl_inexact(__builtin_asinf(x)))
MSL_FUNCTION1(acos, msl_inexact(__builtin_acosf(x)))
MSL_FUNCTION1(atan, msl_inexact(__builtin_atanf(x)))
MSL_FUNCTION1(asinh, msl_inexact(__builtin_asinhf(x)))
MSL_FUNCTION1(acosh, msl_inexact(__builtin_acoshf(x)))
MSL_FUNCTION1(atanh, msl_inexact(__builtin_atanhf(x)))
MSL_FUNCTION1(floor, __builtin_floorf(x))
MSL_FUNCTION1(ceil, __builtin_ceilf(x))
MSL_FUNCTION1(trunc, __builtin_truncf(x))
MSL_FUNCTION1(round, __builtin_roundf(x))
MSL_FUNCTION1(rint, __builtin_rintf(x))
MSL_FUNCTION1(fabs, __builtin_fabsf(x))
MSL_FUNCTION1(fract, __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f))
MSL_FUNCTION1(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))
MSL_FUNCTION1(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : x == 0 ? x : 0.0f)
#undef MSL_FUNCTION1

#define MSL_FUNCTION2(name, expression)     \
  MSL_INLINE float name(float x, float y) { \
    return expression;                      \
  }                                         \
  MSL_INLINE half name(half x, half y) {    \
    return half(name(float(x), float(y)));  \
  }                                         \
  MSL_ELEMENTS2(name)
MSL_FUNCTION2(pow, msl_inexact(__builtin_powf(x, y)))
MSL_FUNCTION2(powr, msl_inexact(__builtin_powf(x, y)))
MSL_FUNCTION2(atan2, msl_inexact(__builtin_atan2f(x, y)))
MSL_FUNCTION2(divide, msl_inexact(x / y))
MSL_FUNCTION2(fmod, __builtin_fmodf(x, y))
MSL_FUNCTION2(fmax, __builtin_fmaxf(x, y))
MSL_FUNCTION2(fmin, __builtin_fminf(x, y))
MSL_FUNCTION2(copysign, __builtin_copysignf(x, y))
MSL_FUNCTION2(step, y < x ? 0.0f : 1.0f)
#undef MSL_FUNCTION2

MSL_INLINE float fma(float x, float y, float z) {
  return __builtin_fmaf(x, y, z);
}
// In double, which only rounds what a term 2^40 times smaller adds.
MSL_INLINE half fma(half x, half y, half z) {
  return half(double(x) * double(y) + double(z));
}
MSL_ELEMENTS3(fma)
MSL_INLINE float mix(float x, float y, float t) {
  return x + (y - x) * t;
}
MSL_INLINE half mix(half x, half y, half t) {
  return half(x + (y - x) * t);
}
MSL_ELEMENTS3(mix)
MSL_INLINE float ldexp(float x, int k) {
  return __builtin_ldexpf(x, k);
}
MSL_INLINE half ldexp(half x, int k) {
  return half(__builtin_ldexpf(float(x), k));
}

#define MSL_CLASSIFY(name, expression)                 \
  MSL_INLINE bool name(float x) {                      \
    return expression;                                 \
  }                                                    \
  MSL_INLINE bool name(half x) {                       \
    return name(float(x));                             \
  }                                                    \
  MSL_INLINE bool name(bfloat x) {                     \
    return name(float(x));                             \
  }                                                    \
  template <typename T, int N>                         \
  MSL_INLINE vec<bool, N> name(vec<T, N> x) {          \
    vec<bool, N> v;                                    \
    for (int i = 0; i < N; i++) v.d[i] = name(x.d[i]); \
    return v;                                          \
  }
MSL_CLASSIFY(isnan, __builtin_isnan(x))
MSL_CLASSIFY(isinf, __builtin_isinf(x) != 0)
MSL_CLASSIFY(isfinite, __builtin_isfinite(x) != 0)
MSL_CLASSIFY(signbit, __builtin_signbit(x) != 0)
#undef MSL_CLASSIFY

// Overloads rather than a template: a call with mixed types is ambiguous, as in Metal.
#define MSL_COMPARISONS(T)                               \
  MSL_INLINE constexpr T max(T x, T y) {                 \
    return x < y ? y : x;                                \
  }                                                      \
  MSL_INLINE constexpr T min(T x, T y) {                 \
    return y < x ? y : x;                                \
  }                                                      \
  MSL_INLINE constexpr T clamp(T x, T low, T high) {     \
    return min(max(x, low), high);                       \
  }                                                      \
  MSL_INLINE constexpr T max3(T x, T y, T z) {           \
    return max(max(x, y), z);                            \
  }                                                      \
  MSL_INLINE constexpr T min3(T x, T y, T z) {           \
    return min(min(x, y), z);                            \
  }                                                      \
  MSL_INLINE constexpr T select(T x, T y, bool second) { \
    return second ? y : x;                               \
  }
MSL_COMPARISONS(char)
MSL_COMPARISONS(int8_t)
MSL_COMPARISONS(uchar)
MSL_COMPARISONS(short)
MSL_COMPARISONS(ushort)
MSL_COMPARISONS(int)
MSL_COMPARISONS(uint)
MSL_COMPARISONS(long)
MSL_COMPARISONS(ulong)
MSL_COMPARISONS(half)
MSL_COMPARISONS(bfloat)
MSL_COMPARISONS(float)
#undef MSL_COMPARISONS
MSL_ELEMENTS2(max)
MSL_ELEMENTS2(min)
MSL_ELEMENTS3(clamp)
template <typename T, int N>
MSL_INLINE vec<T, N> clamp(vec<T, N> x, T low, T high) {
  return clamp(x, vec<T, N>(low), vec<T, N>(high));
}
template <typename T, int N>
MSL_INLINE vec<T, N> select(vec<T, N> x, vec<T, N> y, vec<bool, N> second) {
  vec<T, N> v;
  for (int i = 0; i < N; i++) v.d[i] = second.d[i] ? y.d[i] : x.d[i];
  return v;
}

#define MSL_ABS(T)                  \
  MSL_INLINE constexpr T abs(T x) { \
    return x < T(0) ? T(-x) : x;    \
  }
MSL_ABS(char)
MSL_ABS(int8_t)
MSL_ABS(short)
MSL_ABS(int)
MSL_ABS(long)
#undef MSL_ABS
MSL_INLINE uint abs(uint x) {
  return x;
}
MSL_INLINE ulong abs(ulong x) {
  return x;
}
MSL_INLINE float abs(float x) {
  return __builtin_fabsf(x);
}
MSL_INLINE half abs(half x) {
  return half(__builtin_fabsf(float(x)));
}
MSL_INLINE bfloat abs(bfloat x) {
  return bfloat(__builtin_fabsf(float(x)));
}
MSL_ELEMENTS1(abs)

template <typename T, int N>
MSL_INLINE T dot(vec<T, N> x, vec<T, N> y) {
  T sum = T(x.d[0] * y.d[0]);
  for (int i = 1; i < N; i++) sum = T(sum + x.d[i] * y.d[i]);
  return sum;
}
template <typename T, int N>
MSL_INLINE T length_squared(vec<T, N> x) {
  return dot(x, x);
}
template <typename T, int N>
MSL_INLINE T length(vec<T, N> x) {
  return sqrt(dot(x, x));
}
template <int N>
MSL_INLINE bool any(vec<bool, N> v) {
  bool found = false;
  for (int i = 0; i < N; i++) found |= v.d[i];
  return found;
}
template <int N>
MSL_INLINE bool all(vec<bool, N> v) {
  bool every = true;
  for (int i = 0; i < N; i++) every &= v.d[i];
  return every;
}
#undef MSL_ELEMENTS1
#undef MSL_ELEMENTS2
#undef MSL_ELEMENTS3

#define MSL_SAME_FUNCTIONS                                                                \
  using metal::exp, metal::exp2, metal::exp10, metal::log, metal::log2, metal::log10;     \
  using metal::sqrt, metal::rsqrt, metal::sin, metal::cos, metal::tan, metal::sinh;       \
  using metal::cosh, metal::tanh, metal::asin, metal::acos, metal::atan, metal::asinh;    \
  using metal::acosh, metal::atanh, metal::pow, metal::powr, metal::atan2, metal::divide; \
  using metal::floor, metal::ceil, metal::trunc, metal::round, metal::rint, metal::fabs;  \
  using metal::fract, metal::fmod, metal::fmax, metal::fmin, metal::fma, metal::min;      \
  using metal::max, metal::clamp, metal::abs;
namespace fast {
MSL_SAME_FUNCTIONS
}
namespace precise {
MSL_SAME_FUNCTIONS
}
#undef MSL_SAME_FUNCTIONS

}  // namespace metal
