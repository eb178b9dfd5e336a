// simd.h for AVX-512 (F, BW, DQ, VL; VNNI where there is): a vector of 16 is one register.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace KERNELS {

using vf = __m512;
using vi = __m512i;

static inline vf vset(float x) {
  return _mm512_set1_ps(x);
}
static inline vf vload(const float* p) {
  return _mm512_loadu_ps(p);
}
static inline vf vadd(vf x, vf y) {
  return _mm512_add_ps(x, y);
}
static inline vf vsub(vf x, vf y) {
  return _mm512_sub_ps(x, y);
}
static inline vf vmul(vf x, vf y) {
  return _mm512_mul_ps(x, y);
}
static inline vf vdiv(vf x, vf y) {
  return _mm512_div_ps(x, y);
}
static inline vf vmax(vf x, vf y) {
  return _mm512_max_ps(x, y);
}
static inline vf vmin(vf x, vf y) {
  return _mm512_min_ps(x, y);
}
static inline vf vround(vf x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x * y + z, rounded once.
static inline vf vfma(vf x, vf y, vf z) {
  return _mm512_fmadd_ps(x, y, z);
}
static inline vf vload_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}

static inline vi iset(int32_t x) {
  return _mm512_set1_epi32(x);
}
static inline vi iload(const void* p) {
  return _mm512_loadu_si512(p);
}
static inline vi iadd(vi x, vi y) {
  return _mm512_add_epi32(x, y);
}
static inline vi isub(vi x, vi y) {
  return _mm512_sub_epi32(x, y);
}
static inline vi iand(vi x, vi y) {
  return _mm512_and_si512(x, y);
}
static inline vi ior(vi x, vi y) {
  return _mm512_or_si512(x, y);
}
static inline vi ixor(vi x, vi y) {
  return _mm512_xor_si512(x, y);
}
static inline vi ishl(vi x, int n) {
  return _mm512_slli_epi32(x, n);
}
static inline vi ishr(vi x, int n) {
  return _mm512_srli_epi32(x, n);
}
static inline vi ishr_signed(vi x, int n) {
  return _mm512_srai_epi32(x, n);
}
static inline vi imax(vi x, vi y) {
  return _mm512_max_epi32(x, y);
}
static inline vi iload_u8(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
}
static inline vi iload_u16(const uint16_t* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
}

static inline vf vfrom(vi x) {
  return _mm512_cvtepi32_ps(x);
}
static inline vi vtoint(vf x) {
  return _mm512_cvtps_epi32(x);
}
static inline vf vbits(vi x) {
  return _mm512_castsi512_ps(x);
}
static inline vi ibits(vf x) {
  return _mm512_castps_si512(x);
}

// Sums that a loop adds to, of int32 by their type too. __m512i counts as int64: GCC would copy it
// to another register and back for every addition.
typedef int32_t isums __attribute__((vector_size(64)));

static inline isums isums_set(int32_t x) {
  return (isums)iset(x);
}
// Each lane of x and y a pair of int16: sums + the two products.
static inline isums idot16(vi x, vi y, isums sums) {
#ifdef __AVX512VNNI__
  return (isums)_mm512_dpwssd_epi32((vi)sums, x, y);
#else
  return (isums)iadd((vi)sums, _mm512_madd_epi16(x, y));
#endif
}
static inline vi ilanes(isums sums) {
  return (vi)sums;
}

// Lanes of `yes` where x < y, of `no` elsewhere (also where either is NaN).
static inline vf vselect_less(vf x, vf y, vf yes, vf no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), no, yes);
}

// 16 numbers of 4 bits, low bits first.
static inline vi iload_u4(const uint8_t* p) {
  const __m128i pairs = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
  const __m128i apart = _mm_or_si128(pairs, _mm_slli_epi16(pairs, 4));
  return _mm512_cvtepu8_epi32(_mm_and_si128(apart, _mm_set1_epi8(15)));
}
static inline float widen_f16(uint16_t x) {
  return _cvtsh_ss(x);
}

// table[..] for the two nibbles of each lane, in bits 0 to 3 and 16 to 19; the table isn't
// negative.
static inline vi ilookup_pairs(const int8_t table[16], vi x) {
  const __m512i t = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  const __m512i skip = _mm512_set1_epi32((int)0x80008000);  // a zero for every other byte
  return _mm512_shuffle_epi8(t, _mm512_or_si512(x, skip));
}

static inline void vstore(float* p, vf x) {
  _mm512_storeu_ps(p, x);
}
// The low byte of each lane; lanes must be 0 .. 255.
static inline void istore_u8(uint8_t* p, vi x) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x));
}
static inline void istore_u4(uint8_t* p, vi x) {
  const __m128i pairs = _mm_maddubs_epi16(_mm512_cvtepi32_epi8(x), _mm_set1_epi16(0x1001));
  _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(pairs, pairs));
}
static inline void vstore_f16(uint16_t* p, vf x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

// Lanes that fit into int16.
static inline void istore_i16(int16_t* p, vi x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(x));
}
static inline int32_t isum(vi x) {
  return _mm512_reduce_add_epi32(x);
}
// The largest lane as an integer, read as a float.
static inline float vmaxall_bits(vi x) {
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epi32(x))));
}
static inline void prefetch(const void* p) {
  _mm_prefetch((const char*)p, _MM_HINT_T0);
}

static inline __m256 upper_half(vf x) {
  return _mm512_extractf32x8_ps(x, 1);
}

// Sums lanes i, i + 8, then i + 4, i + 2, i + 1: the same tree at every level.
static inline float vsum(vf x) {
  const __m256 s = _mm256_add_ps(_mm512_castps512_ps256(x), upper_half(x));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
static inline float vmaxall(vf x) {
  const __m256 s = _mm256_max_ps(_mm512_castps512_ps256(x), upper_half(x));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

// Rows of x that the matmul holds in registers at once.
constexpr int TILE_ROWS = 12, INT_TILE_ROWS = 12;

}  // namespace KERNELS
