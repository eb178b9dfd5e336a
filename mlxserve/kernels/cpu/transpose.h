// Sixteen rows of sixteen floats, columns first.
#pragma once

#include "simd.h"

namespace KERNELS {

#if defined(__AVX2__)

// Rows i and i + 4 side by side, so that all shuffles stay within their half of a register.
static inline __m256 pair(const float* in, int64_t stride, int i) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(in + i * stride)),
                              _mm_loadu_ps(in + (i + 4) * stride), 1);
}

// Four columns of eight rows.
static inline void transpose8x4(const float* in, int64_t stride, float* out) {
  const __m256 r0 = pair(in, stride, 0), r1 = pair(in, stride, 1), r2 = pair(in, stride, 2),
               r3 = pair(in, stride, 3);
  const __m256 a = _mm256_unpacklo_ps(r0, r1), b = _mm256_unpackhi_ps(r0, r1);
  const __m256 c = _mm256_unpacklo_ps(r2, r3), d = _mm256_unpackhi_ps(r2, r3);
  _mm256_storeu_ps(out, _mm256_shuffle_ps(a, c, 0x44));
  _mm256_storeu_ps(out + LANES, _mm256_shuffle_ps(a, c, 0xee));
  _mm256_storeu_ps(out + 2 * LANES, _mm256_shuffle_ps(b, d, 0x44));
  _mm256_storeu_ps(out + 3 * LANES, _mm256_shuffle_ps(b, d, 0xee));
}

// out [16, 16] = in [16, 16] transposed; stride: between rows of in.
static inline void transpose16(const float* in, int64_t stride, float* out) {
  for (int column = 0; column < LANES; column += 4) {
    transpose8x4(in + column, stride, out + column * LANES);
    transpose8x4(in + 8 * stride + column, stride, out + column * LANES + 8);
  }
}

#else

static inline void transpose16(const float* in, int64_t stride, float* out) {
  for (int column = 0; column < LANES; column++)
    for (int row = 0; row < LANES; row++) out[column * LANES + row] = in[row * stride + column];
}

#endif

}  // namespace KERNELS
