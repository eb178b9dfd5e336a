// Scalars, traits, limits and constants.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <limits>
#include <type_traits>

#include "msl/abi.h"

#define __METAL__ 1
#define __METAL_VERSION__ 320
#define METAL_FUNC inline __attribute__((always_inline))
#define MSL_INLINE inline __attribute__((always_inline))
// Where a collective operation is called: default arguments are evaluated at the caller's place.
#define MSL_SITE msl_site site = {__builtin_FILE(), __builtin_LINE(), __builtin_COLUMN()}

typedef uint8_t uchar;
typedef uint16_t ushort;
typedef uint32_t uint;
typedef uint64_t ulong;
typedef _Float16 half;

#define M_PI_F 3.14159274101257324219f
#define M_E_F 2.71828174591064453125f
#define M_LOG2E_F 1.44269502162933349609f
#define M_LN2_F 0.69314718246459960938f
#define M_SQRT2_F 1.41421353816986083984f
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT __FLT_MAX__

// A class, so that float and half need an explicit conversion to it, as in Metal.
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  static MSL_INLINE constexpr uint16_t round(float x) {  // to nearest, ties to even
    const uint32_t word = __builtin_bit_cast(uint32_t, x);
    if ((word & 0x7fffffffu) > 0x7f800000u) return uint16_t((word >> 16) | 0x40);  // NaN
    return uint16_t((word + 0x7fffu + ((word >> 16) & 1)) >> 16);
  }
  constexpr explicit bfloat(float x) : bits(round(x)) {}
  constexpr explicit bfloat(half x) : bits(round(float(x))) {}
  template <typename I, typename = std::enable_if_t<std::is_integral<I>::value>>
  constexpr bfloat(I x) : bits(round(float(x))) {}
  constexpr operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
  // clang-format off
#define MSL_ASSIGN(op)                                     \
  template <typename T>                                    \
  MSL_INLINE bfloat& operator op##=(T x) {                 \
    return *this = bfloat(float(*this) op float(x));       \
  }
  MSL_ASSIGN(+) MSL_ASSIGN(-) MSL_ASSIGN(*) MSL_ASSIGN(/)
#undef MSL_ASSIGN
  // clang-format on
};
#define MSL_OPERATOR(op)                                                         \
  constexpr MSL_INLINE bfloat operator op(bfloat a, bfloat b) {                  \
    return bfloat(float(a) op float(b));                                         \
  }                                                                              \
  template <typename I, typename = std::enable_if_t<std::is_integral<I>::value>> \
  constexpr MSL_INLINE bfloat operator op(bfloat a, I b) {                       \
    return bfloat(float(a) op float(b));                                         \
  }                                                                              \
  template <typename I, typename = std::enable_if_t<std::is_integral<I>::value>> \
  constexpr MSL_INLINE bfloat operator op(I a, bfloat b) {                       \
    return bfloat(float(a) op float(b));                                         \
  }
MSL_OPERATOR(+)
MSL_OPERATOR(-)
MSL_OPERATOR(*)
MSL_OPERATOR(/)
#undef MSL_OPERATOR
constexpr MSL_INLINE bfloat operator-(bfloat a) {
  return bfloat(-float(a));
}

constexpr half operator""h(long double x) {
  return half(x);
}
constexpr half operator""h(unsigned long long x) {
  return half(x);
}
constexpr half operator"" H(long double x) {
  return half(x);
}
constexpr bfloat operator"" bf(long double x) {
  return bfloat(float(x));
}

namespace metal {

using ::bfloat, ::half, ::uchar, ::ushort, ::uint, ::ulong, ::size_t;
using ::int8_t, ::int16_t, ::int32_t, ::int64_t;
using ::uint8_t, ::uint16_t, ::uint32_t, ::uint64_t;

using std::conditional, std::conditional_t, std::enable_if, std::enable_if_t;
using std::integral_constant, std::true_type, std::false_type;
using std::is_same, std::is_integral, std::is_signed, std::is_unsigned, std::is_convertible;
using std::remove_cv, std::remove_cv_t, std::remove_reference, std::remove_reference_t;
template <bool B>
using bool_constant = std::integral_constant<bool, B>;
template <typename T>
struct is_floating_point : std::is_floating_point<T> {};
template <>
struct is_floating_point<half> : true_type {};
template <>
struct is_floating_point<bfloat> : true_type {};
template <typename T, typename U>
constexpr bool is_same_v = std::is_same<T, U>::value;
template <typename T>
constexpr bool is_integral_v = std::is_integral<T>::value;
template <typename T>
constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <typename T>
struct is_arithmetic : bool_constant<is_integral_v<T> || is_floating_point_v<T>> {};
template <typename T>
constexpr bool is_arithmetic_v = is_arithmetic<T>::value;

template <typename T>
struct numeric_limits : std::numeric_limits<T> {};
template <typename T>
struct msl_float16_limits {
  static constexpr bool is_specialized = true;
  static constexpr T infinity() { return T(__builtin_inff()); }
  static constexpr T quiet_NaN() { return T(__builtin_nanf("")); }
};
template <>
struct numeric_limits<half> : msl_float16_limits<half> {
  static constexpr half max() { return half(65504.0f); }
  static constexpr half lowest() { return half(-65504.0f); }
  static constexpr half min() { return half(6.103515625e-05f); }
  static constexpr half epsilon() { return half(0.0009765625f); }
};
template <>
struct numeric_limits<bfloat> : msl_float16_limits<bfloat> {
  static constexpr bfloat max() { return bfloat(3.3895313892515355e38f); }
  static constexpr bfloat lowest() { return bfloat(-3.3895313892515355e38f); }
  static constexpr bfloat min() { return bfloat(1.17549435e-38f); }
  static constexpr bfloat epsilon() { return bfloat(0.0078125f); }
};

}  // namespace metal
