// vec<T, N>, packed vectors, and as_type.
#pragma once
#include "msl/types.h"

namespace metal {

template <typename T, int N>
struct vec;

// v.zx and the like: shares its memory with the vector that it is a member of.
template <typename T, int N, int... I>
struct msl_swizzle {
  using V = vec<T, sizeof...(I)>;
  T d[N];
  msl_swizzle() = default;
  msl_swizzle(const msl_swizzle&) = default;
  MSL_INLINE operator V() const {
    constexpr int index[] = {I...};
    V v;
    for (int k = 0; k < int(sizeof...(I)); k++) v.d[k] = d[index[k]];
    return v;
  }
  MSL_INLINE msl_swizzle& operator=(V v) {
    constexpr int index[] = {I...};
    for (int k = 0; k < int(sizeof...(I)); k++) d[index[k]] = v.d[k];
    return *this;
  }
  MSL_INLINE msl_swizzle& operator=(const msl_swizzle& other) { return *this = V(other); }
  // clang-format off
#define MSL_ASSIGN(op) \
  MSL_INLINE msl_swizzle& operator op##=(V v) { return *this = V(*this) op v; }
  MSL_ASSIGN(+) MSL_ASSIGN(-) MSL_ASSIGN(*) MSL_ASSIGN(/)
#undef MSL_ASSIGN
  // clang-format on
};

// The swizzles of two and three components in any order, and the common ones of four.
#define MSL_EACH2(F, ...) F(__VA_ARGS__, x, 0) F(__VA_ARGS__, y, 1)
#define MSL_EACH3(F, ...) MSL_EACH2(F, __VA_ARGS__) F(__VA_ARGS__, z, 2)
#define MSL_EACH4(F, ...) MSL_EACH3(F, __VA_ARGS__) F(__VA_ARGS__, w, 3)
#define MSL_SWIZZLE2(n, a, i, b, j) msl_swizzle<T, n, i, j> a##b;
#define MSL_SWIZZLE3(n, a, i, b, j, c, k) msl_swizzle<T, n, i, j, k> a##b##c;
#define MSL_SWIZZLE4(n, name, i, j, k, l) msl_swizzle<T, n, i, j, k, l> name;
#define MSL_PAIRS2(n, a, i) MSL_SWIZZLE2(n, a, i, x, 0) MSL_SWIZZLE2(n, a, i, y, 1)
#define MSL_PAIRS3(n, a, i) MSL_PAIRS2(n, a, i) MSL_SWIZZLE2(n, a, i, z, 2)
#define MSL_PAIRS4(n, a, i) MSL_PAIRS3(n, a, i) MSL_SWIZZLE2(n, a, i, w, 3)
#define MSL_INNER3(n, a, i, b, j)   \
  MSL_SWIZZLE3(n, a, i, b, j, x, 0) \
  MSL_SWIZZLE3(n, a, i, b, j, y, 1) MSL_SWIZZLE3(n, a, i, b, j, z, 2)
#define MSL_INNER4(n, a, i, b, j) MSL_INNER3(n, a, i, b, j) MSL_SWIZZLE3(n, a, i, b, j, w, 3)
#define MSL_TRIPLES3(n, a, i) \
  MSL_INNER3(n, a, i, x, 0) MSL_INNER3(n, a, i, y, 1) MSL_INNER3(n, a, i, z, 2)
#define MSL_TRIPLES4(n, a, i) \
  MSL_INNER4(n, a, i, x, 0)   \
  MSL_INNER4(n, a, i, y, 1) MSL_INNER4(n, a, i, z, 2) MSL_INNER4(n, a, i, w, 3)

// Vectors of 2 and 4 are copied by one access to memory, as a GPU does; so functions take vectors
// by value. Floats are copied as such, so that what is not initialised is NaN; the others as
// integers, because bfloat is a class here. A vector of 3 is padded to 4, and its last element isn't
// touched.
template <typename T>
using msl_integer = conditional_t<
    sizeof(T) == 1, uint8_t,
    conditional_t<sizeof(T) == 2, uint16_t, conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;
template <typename T>
using msl_word = conditional_t<is_same_v<T, float> || is_same_v<T, half>, T, msl_integer<T>>;
template <typename T, int N>
using msl_words = msl_word<T> __attribute__((ext_vector_type(N)));

template <typename T, int N>
struct msl_storage;
template <typename T>
struct alignas(sizeof(T) * 2) msl_storage<T, 2> {
  union {
    T d[2];
    msl_words<T, 2> words;
    struct {
      T x, y;
    };
    struct {
      T r, g;
    };
    MSL_EACH2(MSL_PAIRS2, 2)
    MSL_SWIZZLE4(2, xxxx, 0, 0, 0, 0)
    MSL_SWIZZLE4(2, xyxy, 0, 1, 0, 1)
  };
  MSL_INLINE void copy(const msl_storage& other) { words = other.words; }
};
template <typename T>
struct alignas(sizeof(T) * 4) msl_storage<T, 3> {
  union {
    T d[3];
    struct {
      T x, y, z;
    };
    struct {
      T r, g, b;
    };
    MSL_EACH3(MSL_PAIRS3, 3)
    MSL_EACH3(MSL_TRIPLES3, 3)
  };
  MSL_INLINE void copy(const msl_storage& other) {
    for (int i = 0; i < 3; i++) d[i] = other.d[i];
  }
};
template <typename T>
struct alignas(sizeof(T) * 4) msl_storage<T, 4> {
  union {
    T d[4];
    msl_words<T, 4> words;
    struct {
      T x, y, z, w;
    };
    struct {
      T r, g, b, a;
    };
    MSL_EACH4(MSL_PAIRS4, 4)
    MSL_EACH4(MSL_TRIPLES4, 4)
    MSL_SWIZZLE4(4, xxxx, 0, 0, 0, 0)
    MSL_SWIZZLE4(4, yyyy, 1, 1, 1, 1)
    MSL_SWIZZLE4(4, zzzz, 2, 2, 2, 2)
    MSL_SWIZZLE4(4, wwww, 3, 3, 3, 3)
    MSL_SWIZZLE4(4, xyzw, 0, 1, 2, 3)
    MSL_SWIZZLE4(4, wzyx, 3, 2, 1, 0)
    MSL_SWIZZLE4(4, yxwz, 1, 0, 3, 2)
    MSL_SWIZZLE4(4, zwxy, 2, 3, 0, 1)
    MSL_SWIZZLE4(4, xzyw, 0, 2, 1, 3)
    MSL_SWIZZLE4(4, xyxy, 0, 1, 0, 1)
    MSL_SWIZZLE4(4, zwzw, 2, 3, 2, 3)
  };
  MSL_INLINE void copy(const msl_storage& other) { words = other.words; }
};
#undef MSL_EACH2
#undef MSL_EACH3
#undef MSL_EACH4
#undef MSL_SWIZZLE2
#undef MSL_SWIZZLE3
#undef MSL_SWIZZLE4
#undef MSL_PAIRS2
#undef MSL_PAIRS3
#undef MSL_PAIRS4
#undef MSL_INNER3
#undef MSL_INNER4
#undef MSL_TRIPLES3
#undef MSL_TRIPLES4

template <typename T>
struct msl_size {
  static constexpr int n = 1;
};
template <typename T, int N>
struct msl_size<vec<T, N>> {
  static constexpr int n = N;
};
template <typename T, int N, int... I>
struct msl_size<msl_swizzle<T, N, I...>> {
  static constexpr int n = sizeof...(I);
};

template <typename T, int N>
struct vec : msl_storage<T, N> {
  using msl_storage<T, N>::d;
  vec() = default;
  MSL_INLINE vec(const vec& other) { this->copy(other); }
  MSL_INLINE vec& operator=(const vec& other) {
    this->copy(other);
    return *this;
  }
  template <typename U, typename = std::enable_if_t<is_arithmetic_v<U>>>
  MSL_INLINE vec(U x) {
    for (int i = 0; i < N; i++) d[i] = static_cast<T>(x);
  }
  template <typename U, typename = std::enable_if_t<!is_same_v<U, T>>>
  MSL_INLINE explicit vec(vec<U, N> other) {
    for (int i = 0; i < N; i++) d[i] = static_cast<T>(other.d[i]);
  }
  template <typename U, int M, int... I,
            typename = std::enable_if_t<sizeof...(I) == N && !is_same_v<U, T>>>
  MSL_INLINE explicit vec(const msl_swizzle<U, M, I...>& other) : vec(vec<U, N>(other)) {}
  // From any mix of scalars and vectors with N components in all.
  template <typename A, typename B, typename... More,
            typename = std::enable_if_t<
                msl_size<A>::n + msl_size<B>::n + (0 + ... + msl_size<More>::n) == N>>
  MSL_INLINE vec(const A& a, const B& b, const More&... more) {
    int k = 0;
    put(k, a);
    put(k, b);
    (put(k, more), ...);
  }
  MSL_INLINE T& operator[](int i) { return d[i]; }
  MSL_INLINE const T& operator[](int i) const { return d[i]; }
  // clang-format off
#define MSL_OPERATOR(op, condition)                             \
  friend MSL_INLINE vec operator op(vec a, vec b) {             \
    static_assert(condition, "an operator of integer vectors"); \
    vec v;                                                      \
    for (int i = 0; i < N; i++) v.d[i] = T(a.d[i] op b.d[i]);   \
    return v;                                                   \
  }                                                             \
  MSL_INLINE vec& operator op##=(vec b) { return *this = *this op b; }
  MSL_OPERATOR(+, true) MSL_OPERATOR(-, true) MSL_OPERATOR(*, true) MSL_OPERATOR(/, true)
  MSL_OPERATOR(%, is_integral_v<T>) MSL_OPERATOR(&, is_integral_v<T>)
  MSL_OPERATOR(|, is_integral_v<T>) MSL_OPERATOR(^, is_integral_v<T>)
  MSL_OPERATOR(<<, is_integral_v<T>) MSL_OPERATOR(>>, is_integral_v<T>)
#undef MSL_OPERATOR
#define MSL_COMPARE(op)                                      \
  friend MSL_INLINE vec<bool, N> operator op(vec a, vec b) { \
    vec<bool, N> v;                                          \
    for (int i = 0; i < N; i++) v.d[i] = a.d[i] op b.d[i];   \
    return v;                                                \
  }
  MSL_COMPARE(<) MSL_COMPARE(<=) MSL_COMPARE(>) MSL_COMPARE(>=) MSL_COMPARE(==) MSL_COMPARE(!=)
  MSL_COMPARE(&&) MSL_COMPARE(||)
#undef MSL_COMPARE
      // clang-format on
      MSL_INLINE vec operator-() const {
    vec v;
    for (int i = 0; i < N; i++) v.d[i] = T(-d[i]);
    return v;
  }
  MSL_INLINE vec operator~() const {
    vec v;
    for (int i = 0; i < N; i++) v.d[i] = T(~d[i]);
    return v;
  }
  MSL_INLINE vec<bool, N> operator!() const {
    vec<bool, N> v;
    for (int i = 0; i < N; i++) v.d[i] = !d[i];
    return v;
  }

 private:
  template <typename U>
  MSL_INLINE std::enable_if_t<is_arithmetic_v<U>> put(int& k, const U& x) {
    d[k++] = static_cast<T>(x);
  }
  template <typename U, int M>
  MSL_INLINE void put(int& k, vec<U, M> v) {
    for (int i = 0; i < M; i++) d[k++] = static_cast<T>(v.d[i]);
  }
  template <typename U, int M, int... I>
  MSL_INLINE void put(int& k, const msl_swizzle<U, M, I...>& v) {
    put(k, vec<U, sizeof...(I)>(v));
  }
};

// A vector that is aligned as its elements are.
template <typename T, int N>
struct packed_vec {
  T d[N];
  packed_vec() = default;
  MSL_INLINE packed_vec(vec<T, N> v) {
    for (int i = 0; i < N; i++) d[i] = v.d[i];
  }
  MSL_INLINE operator vec<T, N>() const {
    vec<T, N> v;
    for (int i = 0; i < N; i++) v.d[i] = d[i];
    return v;
  }
  MSL_INLINE T& operator[](int i) { return d[i]; }
  MSL_INLINE const T& operator[](int i) const { return d[i]; }
};

}  // namespace metal

#define MSL_NAMES_OF(T, n)                       \
  typedef metal::vec<T, n> T##n;                 \
  typedef metal::packed_vec<T, n> packed_##T##n; \
  namespace metal {                              \
  using ::T##n;                                  \
  using ::packed_##T##n;                         \
  }
#define MSL_NAMES(T) MSL_NAMES_OF(T, 2) MSL_NAMES_OF(T, 3) MSL_NAMES_OF(T, 4)
MSL_NAMES(bool)
MSL_NAMES(char)
MSL_NAMES(uchar)
MSL_NAMES(short)
MSL_NAMES(ushort)
MSL_NAMES(int)
MSL_NAMES(uint)
MSL_NAMES(long)
MSL_NAMES(ulong)
MSL_NAMES(half)
MSL_NAMES(float)
MSL_NAMES(bfloat)
#undef MSL_NAMES
#undef MSL_NAMES_OF

namespace metal {
template <typename U, typename T>
MSL_INLINE U as_type(const T& x) {
  static_assert(sizeof(U) == sizeof(T), "as_type: the sizes differ");
  U u;
  __builtin_memcpy(static_cast<void*>(&u), static_cast<const void*>(&x), sizeof(U));
  return u;
}
}  // namespace metal
