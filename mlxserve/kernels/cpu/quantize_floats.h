// Quantisation to small floats (mxfp4, mxfp8, nvfp4), every bit as mx.quantize gives it on a CPU.
#pragma once

#include "codecs.h"
#include "kernels.h"
#include "quantize.h"
#include "simd.h"

namespace KERNELS {

using mlxserve::QuantizeFloats;

// The smallest power of two that is at least x > 0, as its exponent + 127; 0 for all below 2^-127,
// as on Metal. (MLX's CPU operations wrap around there, to factors of 2^123.)
static inline uint8_t e8m0_above(float x) {
  const uint32_t bits = mlxserve::bits_of_float(x), exponent = bits >> 23, rest = bits & 0x7fffff;
  if (exponent == 0) return rest > 0x400000;
  return (uint8_t)(exponent + (rest != 0));
}

// Codes of E2M1: sign, then which of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 is nearest. Of two equally near
// ones it is the smaller, and what becomes 0 has no sign.
static inline vi to_e2m1(vf x) {
  const vf size = vabs(x);
  vf code = vselect_less(x, vset(-0.25f), vset(8), vset(0));
  constexpr float middles[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  UNROLL
  for (const float middle : middles)
    code = vadd(code, vselect_less(vset(middle), size, vset(1), vset(0)));
  return vtoint(code);
}

// What codes of E2M1 stand for.
static inline vf from_e2m1(vi x) {
  const vi magnitude = iand(x, iset(7));
  const vf normal = vbits(iadd(ishl(magnitude, 22), iset(126 << 23)));
  const vf small = vsub(vbits(iadd(ishl(magnitude, 22), iset(127 << 23))), vset(1));
  const vf y = vselect_less(vfrom(magnitude), vset(2), small, normal);
  return vbits(ior(ibits(y), ishl(iand(x, iset(8)), 28)));
}

// Codes of E4M3, half to even; what is larger than 448 becomes 448.
static inline vi to_e4m3(vf x) {
  const vi bits = ibits(x), rest = iand(bits, iset(0x7fffffff)),
           odd = iand(ishr(rest, 20), iset(1));
  const vi normal = ishr(iadd(isub(rest, iset(120 << 23)), iadd(iset(0x7ffff), odd)), 20);
  const vf size = vbits(rest);
  const vi small = isub(ibits(vadd(size, vset(0x1p14f))), iset(141 << 23));
  vf code = vselect_less(size, vset(0x1p-6f), vbits(small), vbits(normal));
  code = vselect_less(size, vset(448), code, vbits(iset(0x7e)));
  return ior(ibits(code), iand(ishr(bits, 24), iset(0x80)));
}

template <Number N, int BITS, int GROUP>
static inline void quantize_float_group(const QuantizeFloats& a, int64_t g, Squares& squares) {
  constexpr int vectors = GROUP / LANES;
  constexpr float largest = BITS == 4 ? 6.0f : 448.0f;
  vf w[vectors], most = vset(0);
  for (int i = 0; i < vectors; i++) {
    w[i] = load_number<N>(a.w, g * GROUP + i * LANES);
    most = vmax(vabs(w[i]), most);
  }
  float lanes[LANES];
  vstore(lanes, round_to<N>(vset(vmaxall(most) / largest)));
  const float wanted = lanes[0];
  // A group of zeros has the factor 1 in the mx formats, and 0 in nvfp4.
  constexpr bool mx_scale = GROUP == 32;
  const uint8_t scale = !mx_scale     ? mlxserve::e4m3_bits(wanted)
                        : wanted == 0 ? 127
                                      : e8m0_above(wanted);
  const float step = mx_scale ? mlxserve::e8m0_value(scale) : mlxserve::e4m3_value(scale);
  a.scales[g] = scale;
  uint8_t* out = a.out + g * GROUP * BITS / 8;
  for (int i = 0; i < vectors; i++, out += 2 * BITS) {
    // MLX rounds after every step to the type of w.
    const vf x = step == 0 ? vset(0) : round_to<N>(vdiv(w[i], vset(step)));
    const vi codes = BITS == 4 ? to_e2m1(x) : to_e4m3(x);
    pack16<BITS>(codes, out);
    squares.add(w[i], vmul(BITS == 4 ? from_e2m1(codes) : from_e4m3(codes), vset(step)));
  }
}

template <Number N, int BITS, int GROUP>
static inline void quantize_float_groups(const QuantizeFloats& a, int64_t begin, int64_t end) {
  Squares squares;
  for (int64_t g = begin; g < end; g++) quantize_float_group<N, BITS, GROUP>(a, g, squares);
  squares.store(a.errors);
}

template <Number N>
static inline void quantize_float_numbers(const QuantizeFloats& a, int64_t begin, int64_t end) {
  if (a.group == 16) return quantize_float_groups<N, 4, 16>(a, begin, end);
  if (a.bits == 4) return quantize_float_groups<N, 4, 32>(a, begin, end);
  quantize_float_groups<N, 8, 32>(a, begin, end);
}

// Groups begin .. end, counted over the whole matrix.
static void quantize_floats(const QuantizeFloats& a, int64_t begin, int64_t end) {
  if (a.number == Number::f32) quantize_float_numbers<Number::f32>(a, begin, end);
  else if (a.number == Number::f16) quantize_float_numbers<Number::f16>(a, begin, end);
  else quantize_float_numbers<Number::bf16>(a, begin, end);
}

}  // namespace KERNELS
