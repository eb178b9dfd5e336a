// Metal's library as declarations only, with address spaces that the compiler checks. Sources are
// parsed against it, never run. Vectors are the compiler's own, which have no constructors:
// lint.py writes `float4(a, b)` as msl_make<float4>(a, b).
#pragma once
#include <stddef.h>
#include <stdint.h>

#define METAL_FUNC inline __attribute__((always_inline))
#define __METAL__ 1
#define __METAL_VERSION__ 320
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT __FLT_MAX__
#define M_PI_F 3.14159274f
#define M_E_F 2.71828175f
#define M_LOG2E_F 1.44269502f
#define M_LN2_F 0.693147182f
#define M_SQRT2_F 1.41421354f
#define device __attribute__((opencl_global))
#define constant __attribute__((opencl_constant))
#define threadgroup __attribute__((opencl_local))
#define thread
#define kernel
// A declaration is enough, and leaves out the question of constructors.
#define MSL_THREADGROUP extern threadgroup

typedef uint8_t uchar;
typedef uint16_t ushort;
typedef uint32_t uint;
typedef uint64_t ulong;
typedef _Float16 half;
typedef __bf16 bfloat;
typedef half float16_t;
typedef bfloat bfloat16_t;

#define MSL_VECTORS(T)                                \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4)));
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(half)
MSL_VECTORS(float)
MSL_VECTORS(bfloat)
// The compiler compares vectors to vectors of int.
typedef int2 bool2;
typedef int3 bool3;
typedef int4 bool4;

half operator""h(long double);
half operator""h(unsigned long long);
half operator"" H(long double);
bfloat operator"" bf(long double);

template <typename V, typename... A>
V msl_make(A...);
template <typename U, typename T>
U as_type(T);

namespace metal {

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));
template <typename T>
struct msl_same {
  typedef T type;
};
template <typename T, typename U>
struct is_same {
  static constexpr bool value = false;
};
template <typename T>
struct is_same<T, T> {
  static constexpr bool value = true;
};
template <typename T, typename U>
constexpr bool is_same_v = is_same<T, U>::value;
template <bool B, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, typename T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <bool B, typename T, typename U>
struct conditional {
  typedef T type;
};
template <typename T, typename U>
struct conditional<false, T, U> {
  typedef U type;
};
template <bool B, typename T, typename U>
using conditional_t = typename conditional<B, T, U>::type;
template <typename T>
struct numeric_limits {
  static constexpr T max();
  static constexpr T min();
  static constexpr T lowest();
  static constexpr T infinity();
  static constexpr T quiet_NaN();
  static constexpr T epsilon();
};

// clang-format off
#define F1(name) template <typename T> T name(T);
#define F2(name) template <typename T> T name(T, T);
#define F3(name) template <typename T> T name(T, T, T);
#define TEST(name) template <typename T> bool name(T);
#define SHUFFLE(name) template <typename T> T name(T, ushort);
#define MATH                                                                                    \
  F1(exp) F1(exp2) F1(exp10) F1(log) F1(log2) F1(log10) F1(sqrt) F1(rsqrt) F1(sin) F1(cos)      \
  F1(tan) F1(sinh) F1(cosh) F1(tanh) F1(asin) F1(acos) F1(atan) F1(asinh) F1(acosh) F1(atanh)   \
  F1(floor) F1(ceil) F1(trunc) F1(round) F1(rint) F1(fabs) F1(fract) F1(abs) F2(pow) F2(powr)   \
  F2(atan2) F2(divide) F2(fmod) F2(fmax) F2(fmin) F2(max) F2(min) F3(fma) F3(clamp)
MATH
namespace fast { MATH }
namespace precise { MATH }
F1(saturate) F1(sign) F2(copysign) F2(step) F3(mix) F3(max3) F3(min3)
TEST(isnan) TEST(isinf) TEST(isfinite) TEST(signbit) TEST(any) TEST(all)
F1(popcount) F1(clz) F1(ctz) F1(reverse_bits) F2(rotate) F2(mulhi)
F1(simd_sum) F1(simd_product) F1(simd_max) F1(simd_min) F1(simd_and) F1(simd_or) F1(simd_xor)
F1(simd_broadcast_first) F1(simd_prefix_inclusive_sum) F1(simd_prefix_exclusive_sum)
F1(simd_prefix_inclusive_product) F1(simd_prefix_exclusive_product) F1(quad_sum) F1(quad_max)
SHUFFLE(simd_shuffle) SHUFFLE(simd_shuffle_xor) SHUFFLE(simd_shuffle_up)
SHUFFLE(simd_shuffle_down) SHUFFLE(simd_shuffle_rotate_up) SHUFFLE(simd_shuffle_rotate_down)
SHUFFLE(simd_broadcast) SHUFFLE(quad_shuffle_xor) SHUFFLE(quad_broadcast)
    // clang-format on
    template <typename T, typename B>
    T select(T, T, B);
template <typename T>
T ldexp(T, int);
template <typename T>
float dot(T, T);
template <typename T>
float length(T);
template <typename T>
float length_squared(T);
template <typename T, typename U>
vec<T, 4> clamp(vec<T, 4>, U, U);
template <typename T>
T extract_bits(T, uint, uint);
template <typename T>
T insert_bits(T, T, uint, uint);

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(uint(a) | uint(b));
}
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
template <typename T>
T simd_shuffle_and_fill_up(T, T, ushort);
template <typename T>
T simd_shuffle_and_fill_down(T, T, ushort);
bool simd_all(bool);
bool simd_any(bool);
bool simd_is_first();
struct simd_vote {
  typedef ulong vote_t;
  explicit operator vote_t() const;
};
simd_vote simd_ballot(bool);

template <typename T, int Rows, int Columns>
struct simdgroup_matrix {
  simdgroup_matrix() {}
  explicit simdgroup_matrix(T) {}
  vec<T, 2> elements;
  vec<T, 2>& thread_elements() { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <typename T, int Rows, int Columns>
simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T);
template <typename D, typename A, typename B, typename C>
void simdgroup_multiply_accumulate(D&, A, B, C);
template <typename D, typename A, typename B>
void simdgroup_multiply(D&, A, B);

enum memory_order { memory_order_relaxed };
template <typename T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
// clang-format off
#define UPDATE(space, name)                                                                        \
  template <typename T>                                                                            \
  T atomic_##name##_explicit(volatile space atomic<T>*, typename msl_same<T>::type, memory_order);
#define MEMORY(space)                                                                              \
  template <typename T>                                                                            \
  void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const space T*, ulong = 8, ulong2 = 0,           \
                      bool = false);                                                               \
  template <typename T>                                                                            \
  void simdgroup_store(simdgroup_matrix<T, 8, 8>, space T*, ulong = 8, ulong2 = 0, bool = false);  \
  template <typename T>                                                                            \
  T atomic_load_explicit(const volatile space atomic<T>*, memory_order);                           \
  template <typename T>                                                                            \
  void atomic_store_explicit(volatile space atomic<T>*, typename msl_same<T>::type, memory_order); \
  UPDATE(space, exchange) UPDATE(space, fetch_add) UPDATE(space, fetch_sub)                        \
  UPDATE(space, fetch_max) UPDATE(space, fetch_min) UPDATE(space, fetch_and)                       \
  UPDATE(space, fetch_or) UPDATE(space, fetch_xor)
MEMORY(device)
MEMORY(threadgroup)
// clang-format on

#undef F1
#undef F2
#undef F3
#undef TEST
#undef MATH
#undef SHUFFLE
#undef UPDATE
#undef MEMORY
}  // namespace metal
using namespace metal;
