// simd.h in plain C++, for any machine: loops that a compiler may vectorise as it can.
#pragma once

#include <stdint.h>
#include <string.h>

#include "numbers.h"

namespace KERNELS {

struct vf {
  float v[16];
};
struct vi {
  int32_t v[16];
};
using isums = vi;  // sums that a loop adds to

#define LANEWISE(type, op, expression)                \
  static inline type op {                             \
    type r;                                           \
    for (int i = 0; i < 16; i++) r.v[i] = expression; \
    return r;                                         \
  }

LANEWISE(vf, vset(float x), x)
LANEWISE(vf, vload(const float* p), p[i])
LANEWISE(vf, vadd(vf x, vf y), x.v[i] + y.v[i])
LANEWISE(vf, vsub(vf x, vf y), x.v[i] - y.v[i])
LANEWISE(vf, vmul(vf x, vf y), x.v[i] * y.v[i])
LANEWISE(vf, vdiv(vf x, vf y), x.v[i] / y.v[i])
LANEWISE(vf, vmax(vf x, vf y), x.v[i] > y.v[i] ? x.v[i] : y.v[i])
LANEWISE(vf, vmin(vf x, vf y), x.v[i] < y.v[i] ? x.v[i] : y.v[i])
LANEWISE(vf, vround(vf x), __builtin_rintf(x.v[i]))
// x * y + z. Rounded twice here: a fused multiply-add in software would take 20 times as long.
LANEWISE(vf, vfma(vf x, vf y, vf z), x.v[i] * y.v[i] + z.v[i])
LANEWISE(vf, vload_f16(const uint16_t* p), mlxserve::f16_value(p[i]))

LANEWISE(vi, iset(int32_t x), x)
LANEWISE(isums, isums_set(int32_t x), x)
LANEWISE(vi, iadd(vi x, vi y), (int32_t)((uint32_t)x.v[i] + (uint32_t)y.v[i]))
LANEWISE(vi, isub(vi x, vi y), (int32_t)((uint32_t)x.v[i] - (uint32_t)y.v[i]))
LANEWISE(vi, iand(vi x, vi y), x.v[i] & y.v[i])
LANEWISE(vi, ior(vi x, vi y), x.v[i] | y.v[i])
LANEWISE(vi, ixor(vi x, vi y), x.v[i] ^ y.v[i])
LANEWISE(vi, ishl(vi x, int n), (int32_t)((uint32_t)x.v[i] << n))
LANEWISE(vi, ishr(vi x, int n), (int32_t)((uint32_t)x.v[i] >> n))
LANEWISE(vi, ishr_signed(vi x, int n), x.v[i] >> n)
LANEWISE(vi, imax(vi x, vi y), x.v[i] > y.v[i] ? x.v[i] : y.v[i])
LANEWISE(vi, iload_u8(const uint8_t* p), p[i])
// 16 numbers of 4 bits, low bits first.
LANEWISE(vi, iload_u4(const uint8_t* p), p[i / 2] >> 4 * (i % 2) & 15)
LANEWISE(vi, iload_u16(const uint16_t* p), p[i])

LANEWISE(vf, vfrom(vi x), (float)x.v[i])
LANEWISE(vi, vtoint(vf x), (int32_t)__builtin_lrintf(x.v[i]))
// Lanes of `yes` where x < y, of `no` elsewhere (also where either is NaN).
LANEWISE(vf, vselect_less(vf x, vf y, vf yes, vf no), x.v[i] < y.v[i] ? yes.v[i] : no.v[i])
LANEWISE(vi, ilanes(isums sums), sums.v[i])
// Each lane of x and y a pair of int16: sums + the two products.
LANEWISE(vi, idot16(vi x, vi y, isums sums),
         (int32_t)((uint32_t)sums.v[i] +
                   (uint32_t)((int16_t)x.v[i] * (int16_t)y.v[i] + (x.v[i] >> 16) * (y.v[i] >> 16))))
// table[..] for the two nibbles of each lane, in bits 0 to 3 and 16 to 19; the table isn't
// negative.
LANEWISE(vi, ilookup_pairs(const int8_t table[16], vi x),
         table[x.v[i] & 15] | table[x.v[i] >> 16] << 16)

#undef LANEWISE

static inline float widen_f16(uint16_t x) {
  return mlxserve::f16_value(x);
}
static inline vi iload(const void* p) {
  vi r;
  memcpy(&r, p, sizeof r);
  return r;
}
static inline vf vbits(vi x) {
  vf r;
  memcpy(&r, &x, sizeof r);
  return r;
}
static inline vi ibits(vf x) {
  vi r;
  memcpy(&r, &x, sizeof r);
  return r;
}
static inline void vstore(float* p, vf x) {
  memcpy(p, &x, sizeof x);
}
// The low byte of each lane; lanes must be 0 .. 255.
static inline void istore_u8(uint8_t* p, vi x) {
  for (int i = 0; i < 16; i++) p[i] = (uint8_t)x.v[i];
}
static inline void istore_u4(uint8_t* p, vi x) {
  for (int i = 0; i < 8; i++) p[i] = (uint8_t)(x.v[2 * i] | x.v[2 * i + 1] << 4);
}
static inline void vstore_f16(uint16_t* p, vf x) {
  for (int i = 0; i < 16; i++) p[i] = mlxserve::f16_bits(x.v[i]);
}

static inline void istore_i16(int16_t* p, vi x) {
  for (int i = 0; i < 16; i++) p[i] = (int16_t)x.v[i];
}
static inline int32_t isum(vi x) {
  int32_t r = 0;
  for (int i = 0; i < 16; i++) r += x.v[i];
  return r;
}
// The largest lane as an integer, read as a float.
static inline float vmaxall_bits(vi x) {
  int32_t r = x.v[0];
  for (int i = 1; i < 16; i++) r = x.v[i] > r ? x.v[i] : r;
  return mlxserve::float_of((uint32_t)r);
}
static inline void prefetch(const void*) {}

// Sums lanes i, i + 8, then i + 4, i + 2, i + 1: the same tree at every level.
static inline float vsum(vf x) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) x.v[i] += x.v[i + half];
  return x.v[0];
}
static inline float vmaxall(vf x) {
  float r = x.v[0];
  for (int i = 1; i < 16; i++) r = x.v[i] > r ? x.v[i] : r;
  return r;
}

// Rows of x that the matmul holds in registers at once.
constexpr int TILE_ROWS = 4, INT_TILE_ROWS = 4;

}  // namespace KERNELS
