// simd.h for AVX2 with FMA and F16C: a vector of 16 is two registers.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace KERNELS {

struct vf {
  __m256 a, b;
};
struct vi {
  __m256i a, b;
};

#define BOTH(type, op, ...) \
  static inline type op {   \
    return {__VA_ARGS__};   \
  }

BOTH(vf, vset(float x), _mm256_set1_ps(x), _mm256_set1_ps(x))
BOTH(vf, vload(const float* p), _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8))
BOTH(vf, vadd(vf x, vf y), _mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b))
BOTH(vf, vsub(vf x, vf y), _mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b))
BOTH(vf, vmul(vf x, vf y), _mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b))
BOTH(vf, vdiv(vf x, vf y), _mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b))
BOTH(vf, vmax(vf x, vf y), _mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b))
BOTH(vf, vmin(vf x, vf y), _mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b))
BOTH(vf, vround(vf x), _mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
     _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
// x * y + z, rounded once.
BOTH(vf, vfma(vf x, vf y, vf z), _mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b))
BOTH(vf, vload_f16(const uint16_t* p), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
     _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8))))

BOTH(vi, iset(int32_t x), _mm256_set1_epi32(x), _mm256_set1_epi32(x))
BOTH(vi, iload(const void* p), _mm256_loadu_si256((const __m256i*)p),
     _mm256_loadu_si256((const __m256i*)p + 1))
BOTH(vi, iadd(vi x, vi y), _mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b))
BOTH(vi, isub(vi x, vi y), _mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b))
BOTH(vi, iand(vi x, vi y), _mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b))
BOTH(vi, ior(vi x, vi y), _mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b))
BOTH(vi, ixor(vi x, vi y), _mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b))
BOTH(vi, ishl(vi x, int n), _mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n))
BOTH(vi, ishr(vi x, int n), _mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n))
BOTH(vi, ishr_signed(vi x, int n), _mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n))
BOTH(vi, imax(vi x, vi y), _mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b))
BOTH(vi, iload_u8(const uint8_t* p), _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
     _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))
BOTH(vi, iload_u16(const uint16_t* p), _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)),
     _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8))))

BOTH(vf, vfrom(vi x), _mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b))
BOTH(vi, vtoint(vf x), _mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b))
BOTH(vf, vbits(vi x), _mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b))
BOTH(vi, ibits(vf x), _mm256_castps_si256(x.a), _mm256_castps_si256(x.b))

// Sums that a loop adds to, of int32 by their type too. __m256i counts as int64: GCC would copy it
// to another register and back for every addition.
typedef int32_t half_sums __attribute__((vector_size(32)));
struct isums {
  half_sums a, b;
};

BOTH(isums, isums_set(int32_t x), (half_sums)_mm256_set1_epi32(x), (half_sums)_mm256_set1_epi32(x))
// Each lane of x and y a pair of int16: sums + the two products.
BOTH(isums, idot16(vi x, vi y, isums sums),
     (half_sums)_mm256_add_epi32((__m256i)sums.a, _mm256_madd_epi16(x.a, y.a)),
     (half_sums)_mm256_add_epi32((__m256i)sums.b, _mm256_madd_epi16(x.b, y.b)))
BOTH(vi, ilanes(isums sums), (__m256i)sums.a, (__m256i)sums.b)

// Lanes of `yes` where x < y, of `no` elsewhere (also where either is NaN).
BOTH(vf, vselect_less(vf x, vf y, vf yes, vf no),
     _mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
     _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)))

#undef BOTH

// 16 numbers of 4 bits, low bits first.
static inline vi iload_u4(const uint8_t* p) {
  const auto word = [](const uint8_t* at) {
    return _mm256_castps_si256(_mm256_broadcast_ss((const float*)at));
  };
  const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28),
                low = _mm256_set1_epi32(15);
  return {_mm256_and_si256(_mm256_srlv_epi32(word(p), shifts), low),
          _mm256_and_si256(_mm256_srlv_epi32(word(p + 4), shifts), low)};
}
static inline float widen_f16(uint16_t x) {
  return _cvtsh_ss(x);
}

// table[..] for the two nibbles of each lane, in bits 0 to 3 and 16 to 19; the table isn't
// negative.
static inline vi ilookup_pairs(const int8_t table[16], vi x) {
  const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  const __m256i skip = _mm256_set1_epi32((int)0x80008000);  // a zero for every other byte
  return {_mm256_shuffle_epi8(t, _mm256_or_si256(x.a, skip)),
          _mm256_shuffle_epi8(t, _mm256_or_si256(x.b, skip))};
}

static inline void vstore(float* p, vf x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
// The low byte of each lane; lanes must be 0 .. 255.
static inline __m128i ibytes(vi x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(x.a, x.b), 0xd8);
  return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
static inline void istore_u8(uint8_t* p, vi x) {
  _mm_storeu_si128((__m128i*)p, ibytes(x));
}
// The low 4 bits, low bits first; lanes must be 0 .. 15.
static inline void istore_u4(uint8_t* p, vi x) {
  const __m128i pairs = _mm_maddubs_epi16(ibytes(x), _mm_set1_epi16(0x1001));
  _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(pairs, pairs));
}
static inline void vstore_f16(uint16_t* p, vf x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}

// Lanes that fit into int16.
static inline void istore_i16(int16_t* p, vi x) {
  const __m256i packed = _mm256_packs_epi32(x.a, x.b);
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
static inline int32_t isum(vi x) {
  const __m256i s = _mm256_add_epi32(x.a, x.b);
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
// The largest lane as an integer, read as a float.
static inline float vmaxall_bits(vi x) {
  const __m256i s = _mm256_max_epi32(x.a, x.b);
  __m128i q = _mm_max_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(q));
}
static inline void prefetch(const void* p) {
  _mm_prefetch((const char*)p, _MM_HINT_T0);
}

// Sums lanes i, i + 8, then i + 4, i + 2, i + 1: the same tree at every level.
static inline float vsum(vf x) {
  const __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
static inline float vmaxall(vf x) {
  const __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

// Rows of x that the matmul holds in registers at once.
constexpr int TILE_ROWS = 6, INT_TILE_ROWS = 4;

}  // namespace KERNELS
