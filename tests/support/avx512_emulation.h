// AVX-512 on a processor without it, for tests: the intrinsics that simd_avx512.h uses, by SIMDe's
// definitions (Debian's libsimde-dev) or, where SIMDe 0.7 has none, by loops after Intel's guide.
#pragma once
#include <immintrin.h>
#include <simde/x86/avx512.h>
#include <simde/x86/fma.h>
#include <stdint.h>
#include <string.h>
static_assert(SIMDE_NATURAL_VECTOR_SIZE == 256);
#ifdef __AVX512F__
#error not meant
#endif
// two halves, by AVX2
#define LO_I(x) _mm256_loadu_si256((const __m256i*)&(x))
#define HI_I(x) _mm256_loadu_si256((const __m256i*)&(x) + 1)
#define LO_F(x) _mm256_loadu_ps((const float*)&(x))
#define HI_F(x) _mm256_loadu_ps((const float*)&(x) + 8)
#define EMU static inline __attribute__((always_inline))
EMU __m512 join_f(__m256 a, __m256 b) {
  __m512 r;
  memcpy(&r, &a, 32);
  memcpy((char*)&r + 32, &b, 32);
  return r;
}
EMU __m512i join_i(__m256i a, __m256i b) {
  __m512i r;
  memcpy(&r, &a, 32);
  memcpy((char*)&r + 32, &b, 32);
  return r;
}
// Missing in SIMDe 0.7.4.
EMU __m128i e_cvtepi32_epi8(__m512i x) {
  int32_t s[16];
  uint8_t d[16];
  memcpy(s, &x, 64);
  for (int i = 0; i < 16; i++) d[i] = (uint8_t)s[i];
  __m128i r;
  memcpy(&r, d, 16);
  return r;
}
EMU __m512 e_cvtepi32_ps(__m512i x) {
  int32_t s[16];
  float d[16];
  memcpy(s, &x, 64);
  for (int i = 0; i < 16; i++) d[i] = (float)s[i];
  __m512 r;
  memcpy(&r, d, 64);
  return r;
}
EMU __m512i e_cvtepu16_epi32(__m256i x) {
  uint16_t s[16];
  int32_t d[16];
  memcpy(s, &x, 32);
  for (int i = 0; i < 16; i++) d[i] = s[i];
  __m512i r;
  memcpy(&r, d, 64);
  return r;
}
EMU __m512i e_cvtepu8_epi32(__m128i x) {
  uint8_t s[16];
  int32_t d[16];
  memcpy(s, &x, 16);
  for (int i = 0; i < 16; i++) d[i] = s[i];
  __m512i r;
  memcpy(&r, d, 64);
  return r;
}
EMU __m512 e_cvtph_ps(__m256i x) {
  return join_f(_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
                _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)));
}
EMU __m512i e_cvtps_epi32(__m512 x) {
  return join_i(_mm256_cvtps_epi32(LO_F(x)), _mm256_cvtps_epi32(HI_F(x)));
}
#define e_cvtps_ph(x, imm) e_cvtps_ph_<(imm)>(x)
template <int imm>
EMU __m256i e_cvtps_ph_(__m512 x) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm256_cvtps_ph(LO_F(x), imm & 7)),
                                 _mm256_cvtps_ph(HI_F(x), imm & 7), 1);
}
EMU __m256 e_extractf32x8_ps(__m512 x, int i) {
  float d[16];
  memcpy(d, &x, 64);
  return _mm256_loadu_ps(d + 8 * (i & 1));
}
EMU int e_reduce_add_epi32(__m512i x) {
  uint32_t s[16], t = 0;
  memcpy(s, &x, 64);
  for (int i = 0; i < 16; i++) t += s[i];
  return (int)t;
}
EMU int e_reduce_max_epi32(__m512i x) {
  int32_t s[16];
  memcpy(s, &x, 64);
  int t = s[0];
  for (int i = 1; i < 16; i++) t = s[i] > t ? s[i] : t;
  return t;
}
EMU __m512i e_srai_epi32(__m512i x, unsigned n) {
  int32_t s[16];
  memcpy(s, &x, 64);
  for (int i = 0; i < 16; i++) s[i] = s[i] >> (n > 31 ? 31 : n);
  __m512i r;
  memcpy(&r, s, 64);
  return r;
}
#define _mm512_cvtepi32_epi8 e_cvtepi32_epi8
#define _mm512_cvtepi32_ps e_cvtepi32_ps
#define _mm512_cvtepu16_epi32 e_cvtepu16_epi32
#define _mm512_cvtepu8_epi32 e_cvtepu8_epi32
#define _mm512_cvtph_ps e_cvtph_ps
#define _mm512_cvtps_epi32 e_cvtps_epi32
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(x, i) e_cvtps_ph(x, i)
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps e_extractf32x8_ps
#define _mm512_reduce_add_epi32 e_reduce_add_epi32
#define _mm512_reduce_max_epi32 e_reduce_max_epi32
#undef _mm512_srai_epi32
#define _mm512_srai_epi32 e_srai_epi32
// The rest: SIMDe's.
#undef _mm512_add_epi32
#define _mm512_add_epi32(...) simde_mm512_add_epi32(__VA_ARGS__)
#undef _mm512_add_ps
#define _mm512_add_ps(...) simde_mm512_add_ps(__VA_ARGS__)
#undef _mm512_and_si512
#define _mm512_and_si512(...) simde_mm512_and_si512(__VA_ARGS__)
#undef _mm512_broadcast_i32x4
#define _mm512_broadcast_i32x4(...) simde_mm512_broadcast_i32x4(__VA_ARGS__)
#undef _mm512_castps512_ps256
#define _mm512_castps512_ps256(...) simde_mm512_castps512_ps256(__VA_ARGS__)
#undef _mm512_castps_si512
#define _mm512_castps_si512(...) simde_mm512_castps_si512(__VA_ARGS__)
#undef _mm512_castsi512_ps
#define _mm512_castsi512_ps(...) simde_mm512_castsi512_ps(__VA_ARGS__)
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask(...) simde_mm512_cmp_ps_mask(__VA_ARGS__)
#undef _mm512_cvtsepi32_epi16
#define _mm512_cvtsepi32_epi16(...) simde_mm512_cvtsepi32_epi16(__VA_ARGS__)
#undef _mm512_div_ps
#define _mm512_div_ps(...) simde_mm512_div_ps(__VA_ARGS__)
#undef _mm512_dpwssd_epi32
#define _mm512_dpwssd_epi32(...) simde_mm512_dpwssd_epi32(__VA_ARGS__)
#undef _mm512_fmadd_ps
#define _mm512_fmadd_ps(...) simde_mm512_fmadd_ps(__VA_ARGS__)
#undef _mm512_loadu_ps
#define _mm512_loadu_ps(...) simde_mm512_loadu_ps(__VA_ARGS__)
#undef _mm512_loadu_si512
#define _mm512_loadu_si512(...) simde_mm512_loadu_si512(__VA_ARGS__)
#undef _mm512_madd_epi16
#define _mm512_madd_epi16(...) simde_mm512_madd_epi16(__VA_ARGS__)
#undef _mm512_mask_blend_ps
#define _mm512_mask_blend_ps(...) simde_mm512_mask_blend_ps(__VA_ARGS__)
#undef _mm512_max_epi32
#define _mm512_max_epi32(...) simde_mm512_max_epi32(__VA_ARGS__)
#undef _mm512_max_ps
#define _mm512_max_ps(...) simde_mm512_max_ps(__VA_ARGS__)
#undef _mm512_min_ps
#define _mm512_min_ps(...) simde_mm512_min_ps(__VA_ARGS__)
#undef _mm512_mul_ps
#define _mm512_mul_ps(...) simde_mm512_mul_ps(__VA_ARGS__)
#undef _mm512_or_si512
#define _mm512_or_si512(...) simde_mm512_or_si512(__VA_ARGS__)
#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps(...) simde_mm512_roundscale_ps(__VA_ARGS__)
#undef _mm512_set1_epi32
#define _mm512_set1_epi32(...) simde_mm512_set1_epi32(__VA_ARGS__)
#undef _mm512_set1_ps
#define _mm512_set1_ps(...) simde_mm512_set1_ps(__VA_ARGS__)
#undef _mm512_shuffle_epi8
#define _mm512_shuffle_epi8(...) simde_mm512_shuffle_epi8(__VA_ARGS__)
#undef _mm512_slli_epi32
#define _mm512_slli_epi32(...) simde_mm512_slli_epi32(__VA_ARGS__)
#undef _mm512_srli_epi32
#define _mm512_srli_epi32(...) simde_mm512_srli_epi32(__VA_ARGS__)
#undef _mm512_storeu_ps
#define _mm512_storeu_ps(...) simde_mm512_storeu_ps(__VA_ARGS__)
#undef _mm512_sub_epi32
#define _mm512_sub_epi32(...) simde_mm512_sub_epi32(__VA_ARGS__)
#undef _mm512_sub_ps
#define _mm512_sub_ps(...) simde_mm512_sub_ps(__VA_ARGS__)
#undef _mm512_xor_si512
#define _mm512_xor_si512(...) simde_mm512_xor_si512(__VA_ARGS__)
