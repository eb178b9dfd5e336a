// Rotary positions, with the RMS norm per head that some models have before them.
#pragma once

#include "rows.h"

namespace KERNELS {

using mlxserve::Rope;

// gain * cos and sin of position / periods[i]; c and s have room for whole vectors.
static inline void rotations(const Rope& a, int64_t position, float* c, float* s) {
  const int64_t pairs = a.dim / 2;
  for (int64_t i = 0; i < pairs; i += LANES) {
    const int count = pairs - i < LANES ? (int)(pairs - i) : LANES;
    double period[LANES];
    float rest[LANES];
    int32_t quarter[LANES];
    for (int j = 0; j < LANES; j++) period[j] = j < count ? a.periods[i + j] : 1.0;
    for (int j = 0; j < LANES; j++) {
      // In quarter turns and in double: at position 131072 float32 would be 0.008 radians off.
      // Adding 1.5 * 2^52 rounds to a whole number and leaves its low bits at the bottom.
      const double turns = (double)position / period[j] * 0.63661977236758134308;
      const double shifted = turns + 0x1.8p52;
      int64_t bits;
      memcpy(&bits, &shifted, 8);
      quarter[j] = (int32_t)(bits & 3);
      rest[j] = (float)((turns - (shifted - 0x1.8p52)) * 1.57079632679489661923);
    }
    // Cephes' polynomials, on -pi/4 .. pi/4.
    const vf x = vload(rest), z = vmul(x, x);
    vf sine = vfma(vset(-1.9515295891e-4f), z, vset(8.3321608736e-3f));
    sine = vfma(sine, z, vset(-1.6666654611e-1f));
    sine = vfma(vmul(sine, z), x, x);
    vf cosine = vfma(vset(2.443315711809948e-5f), z, vset(-1.388731625493765e-3f));
    cosine = vfma(cosine, z, vset(4.166664568298827e-2f));
    cosine = vfma(vmul(cosine, z), z, vfma(vset(-0.5f), z, vset(1)));
    // Odd quarters swap the two; the cosine is negative in 1 and 2, the sine in 2 and 3.
    const vi q = iload(quarter);
    const vf odd = vfrom(iand(q, iset(1)));
    const vf cosine_sign = vfrom(isub(iset(1), iand(iadd(q, iset(1)), iset(2))));
    const vf sine_sign = vfrom(isub(iset(1), iand(q, iset(2))));
    const vf gain = vset(a.gain);
    vstore(c + i, vmul(vmul(vselect_less(vset(0), odd, sine, cosine), cosine_sign), gain));
    vstore(s + i, vmul(vmul(vselect_less(vset(0), odd, cosine, sine), sine_sign), gain));
  }
}

static inline void rotate_head(const float* x, const float* norm, float eps, const float* c,
                               const float* s, int64_t pairs, float* out) {
  const vf scale = vset(norm ? inverse_rms(x, 2 * pairs, eps) : 1.0f);
  for_lanes(pairs, [=](int64_t i, int count) {
    vf first = load_some(x + i, count), second = load_some(x + pairs + i, count);
    if (norm) {
      first = vmul(vmul(first, scale), load_some(norm + i, count));
      second = vmul(vmul(second, scale), load_some(norm + pairs + i, count));
    }
    const vf cosine = vload(c + i), sine = vload(s + i);
    store_some(out + i, vsub(vmul(first, cosine), vmul(second, sine)), count);
    store_some(out + pairs + i, vadd(vmul(second, cosine), vmul(first, sine)), count);
  });
}

// Tokens begin .. end. Sine and cosine are computed once for all heads of a token.
static void rope(const Rope& a, int64_t begin, int64_t end) {
  alignas(64) float c[mlxserve::MAX_ROPE_DIM / 2], s[mlxserve::MAX_ROPE_DIM / 2];
  const int64_t q_width = a.q_heads * a.dim, k_width = a.k_heads * a.dim;
  for (int64_t t = begin; t < end; t++) {
    rotations(a, a.positions[t], c, s);
    for (int64_t at = t * q_width; at < (t + 1) * q_width; at += a.dim)
      rotate_head(a.q + at, a.q_norm, a.eps, c, s, a.dim / 2, a.q_out + at);
    for (int64_t at = t * k_width; at < (t + 1) * k_width; at += a.dim)
      rotate_head(a.k + at, a.k_norm, a.eps, c, s, a.dim / 2, a.k_out + at);
  }
}

}  // namespace KERNELS
