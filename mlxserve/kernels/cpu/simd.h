// Sixteen lanes of float or int32, the same names at every instruction level.
//
// A kernel file is compiled once per level, inside the namespace KERNELS, and sees nothing of the
// C++ library: a template instantiated with AVX flags could otherwise be the copy that the linker
// keeps for everyone, and an old machine would die of it.
#pragma once

#include <stdint.h>
#include <string.h>

#include "numbers.h"

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

// Before a loop over accumulators: only an unrolled one keeps them in registers.
#define UNROLL _Pragma("GCC unroll 16")

namespace KERNELS {

constexpr int LANES = 16;

static inline vf vload_bf16(const uint16_t* p) {
  return vbits(ishl(iload_u16(p), 16));
}

// Rounds half to even; NaN stays NaN.
static inline void vstore_bf16(uint16_t* p, vf x) {
  float lanes[LANES];
  vstore(lanes, x);
  for (int i = 0; i < LANES; i++) p[i] = mlxserve::bf16_bits(lanes[i]);
}

// 2^-n * exp(x) for the whole number n that is nearest to x / ln 2. Cephes' polynomial.
static inline vf exp_fraction(vf x, vf* n) {
  *n = vround(vmul(x, vset(1.44269504088896341f)));
  vf r = vfma(*n, vset(-0.693359375f), x);
  r = vfma(*n, vset(2.12194440e-4f), r);
  vf p = vset(1.9875691500e-4f);
  p = vfma(p, r, vset(1.3981999507e-3f));
  p = vfma(p, r, vset(8.3334519073e-3f));
  p = vfma(p, r, vset(4.1665795894e-2f));
  p = vfma(p, r, vset(1.6666665459e-1f));
  p = vfma(p, r, vset(5.0000001201e-1f));
  return vadd(vfma(p, vmul(r, r), r), vset(1.0f));
}

// exp(x) to 2 units in the last place; 0 below -87.3, infinity above 88.7; NaN stays NaN.
static inline vf vexp(vf x) {
  // Both give their second argument where one of the two is NaN.
  const vf clamped = vmin(vset(88.7f), vmax(vset(-87.3f), x));
  vf n;
  const vf p = exp_fraction(clamped, &n);
  // 2^n in two factors: n may be 128, which no single float32 exponent holds.
  const vi whole = vtoint(n);
  const vi half = ishr_signed(whole, 1);
  const vf a = vbits(ishl(iadd(half, iset(127)), 23));
  const vf b = vbits(ishl(iadd(isub(whole, half), iset(127)), 23));
  const vf y = vmul(vmul(p, a), b);
  return vselect_less(x, vset(-87.3f), vset(0.0f),
                      vselect_less(vset(88.7f), x, vset(__builtin_inff()), y));
}

// The same for x that are at most 0, in three quarters of the time.
static inline vf vexp_negative(vf x) {
  vf n;
  const vf p = exp_fraction(vmax(vset(-87.3f), x), &n);
  const vf y = vmul(p, vbits(ishl(iadd(vtoint(n), iset(127)), 23)));
  return vselect_less(x, vset(-87.3f), vset(0.0f), y);
}

// tanh(x); NaN stays NaN. Cephes' tanhf: near 0 a polynomial, which loses nothing.
static inline vf vtanh(vf x) {
  const vf z = vmul(x, x), size = vmax(x, vsub(vset(0), x));
  vf p = vset(-5.70498872745e-3f);
  p = vfma(p, z, vset(2.06390887954e-2f));
  p = vfma(p, z, vset(-5.37397155531e-2f));
  p = vfma(p, z, vset(1.33314422036e-1f));
  p = vfma(p, z, vset(-3.33332819422e-1f));
  const vf near = vfma(vmul(p, z), x, x);
  const vf far = vsub(vset(1), vdiv(vset(2), vadd(vexp(vadd(x, x)), vset(1))));
  return vselect_less(size, vset(0.625f), near, far);
}

}  // namespace KERNELS
