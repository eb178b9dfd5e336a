// Affine quantisation, every bit as mx.quantize gives it on a CPU.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace KERNELS {

using mlxserve::Number;
using mlxserve::Quantize;

template <Number N>
static inline vf load_number(const void* p, int64_t i) {
  if constexpr (N == Number::f32) return vload((const float*)p + i);
  else if constexpr (N == Number::f16) return vload_f16((const uint16_t*)p + i);
  else return vload_bf16((const uint16_t*)p + i);
}

template <Number N>
static inline void store_number(void* p, int64_t i, float x) {
  if constexpr (N == Number::f32) {
    ((float*)p)[i] = x;
  } else if constexpr (N == Number::f16) {
    uint16_t lanes[LANES];
    vstore_f16(lanes, vset(x));
    ((uint16_t*)p)[i] = lanes[0];
  } else {
    ((uint16_t*)p)[i] = mlxserve::bf16_bits(x);
  }
}

// The nearest number of the type, half to even.
template <Number N>
static inline vf round_to(vf x) {
  if constexpr (N == Number::f32) return x;
  if constexpr (N == Number::f16) {
    uint16_t lanes[LANES];
    vstore_f16(lanes, x);
    return vload_f16(lanes);
  }
  const vi bits = ibits(x), odd = iand(ishr(bits, 16), iset(1));
  return vbits(iand(iadd(bits, iadd(iset(0x7fff), odd)), iset((int32_t)0xffff0000)));
}

// Sums of squares: of w, and of w less what stands for it.
struct Squares {
  vf error = vset(0), all = vset(0);

  ALWAYS_INLINE void add(vf w, vf rounded) {
    const vf off = vsub(w, rounded);
    error = vfma(off, off, error);
    all = vfma(w, w, all);
  }
  ALWAYS_INLINE void store(float* out) const {
    out[0] = vsum(error);
    out[1] = vsum(all);
  }
};

// Of fields WIDTH bits wide, each pair's BITS low bits end to end, in a field twice as wide.
template <int BITS, int WIDTH>
ALWAYS_INLINE uint64_t join_fields(uint64_t x) {
  constexpr uint64_t bottoms = ~0ull / ((1ull << 2 * WIDTH) - 1);  // of the wide fields
  constexpr uint64_t one = bottoms * ((1ull << BITS) - 1), both = one | one << BITS;
  if constexpr (2 * BITS <= WIDTH) return (x | x >> (WIDTH - BITS)) & both;  // nothing overlaps
  return (x & one) | (x >> (WIDTH - BITS) & one << BITS);
}

// 16 numbers of BITS bits, low bits first: 2 * BITS bytes.
template <int BITS>
static inline void pack16(vi q, uint8_t* out) {
  if constexpr (BITS == 8) {
    istore_u8(out, q);
  } else if constexpr (BITS == 4) {
    istore_u4(out, q);
  } else {
    uint8_t bytes[LANES];
    istore_u8(bytes, q);
    uint64_t words[2];
    memcpy(words, bytes, LANES);
    for (uint64_t& x : words) {
      x = join_fields<2 * BITS, 16>(join_fields<BITS, 8>(x));
      x = x >> 32 << (4 * BITS) | (uint32_t)x;
    }
    const uint64_t first = words[0] | words[1] << (8 * BITS);
    memcpy(out, &first, BITS < 4 ? 2 * BITS : 8);
    if constexpr (BITS > 4) {
      const uint64_t rest = words[1] >> (64 - 8 * BITS);
      memcpy(out + 8, &rest, 2 * BITS - 8);
    }
  }
}

static inline vf vabs(vf x) {
  return vbits(iand(ibits(x), iset(0x7fffffff)));
}

// The smallest and largest of a group's numbers.
template <Number N>
static inline void group_range(const Quantize& a, int64_t g, float* least, float* most) {
  const vf infinity = vset(__builtin_inff());
  vf low = infinity, high = vsub(vset(0), infinity);
  for (int64_t i = g * a.group; i < (g + 1) * a.group; i += LANES) {
    const vf x = load_number<N>(a.w, i);
    low = vmin(x, low);  // this way round a NaN in x is passed over
    high = vmax(x, high);
  }
  *least = -vmaxall(vsub(vset(0), low));
  *most = vmaxall(high);
}

// Scales and biases of 16 groups at once, in float32.
static inline void scales_of(vf least, vf most, float top, vf* scale, vf* bias) {
  const vf smallest = vset(1e-7f), zero = vset(0);
  vf step = vdiv(vsub(most, least), vset(top));
  step = vselect_less(smallest, step, step, smallest);
  // q = 0 is the edge of larger magnitude, exactly; the step is set so that 0 is a whole q too.
  const vf low_size = vabs(least), high_size = vabs(most);
  step = vselect_less(high_size, low_size, step, vsub(zero, step));
  const vf edge = vselect_less(high_size, low_size, least, most);
  const vf q0 = vround(vdiv(edge, step)), size = vabs(q0);
  *scale = vselect_less(zero, size, vdiv(edge, q0), step);
  *bias = vselect_less(zero, size, edge, zero);
}

// A group's q, from the scale and bias in float32 and not from what is stored.
template <Number N, int BITS>
static inline void quantize_group(const Quantize& a, int64_t g, float scale, float bias,
                                  Squares& squares) {
  constexpr float top = (1 << BITS) - 1;
  const int64_t first = g * a.group;
  uint8_t* out = a.out + first * BITS / 8;
  const vf step = vset(scale), shift = vset(bias);
  const vf stored_step = round_to<N>(step), stored_shift = round_to<N>(shift);
  for (int i = 0; i < a.group; i += LANES, out += 2 * BITS) {
    const vf w = load_number<N>(a.w, first + i);
    const vf q = vmin(vmax(vround(vdiv(vsub(w, shift), step)), vset(0)), vset(top));
    pack16<BITS>(vtoint(q), out);
    squares.add(w, vfma(q, stored_step, stored_shift));
  }
  store_number<N>(a.scales, g, scale);
  store_number<N>(a.biases, g, bias);
}

// 16 groups at a time, in three passes, so that no group waits for the one before.
template <Number N, int BITS>
static inline void quantize_groups(const Quantize& a, int64_t begin, int64_t end) {
  Squares squares;
  for (int64_t g = begin; g < end; g += LANES) {
    const int n = end - g < LANES ? (int)(end - g) : LANES;
    alignas(64) float least[LANES] = {}, most[LANES] = {}, scales[LANES], biases[LANES];
    for (int i = 0; i < n; i++) group_range<N>(a, g + i, least + i, most + i);
    vf scale, bias;
    scales_of(vload(least), vload(most), (1 << BITS) - 1, &scale, &bias);
    vstore(scales, scale);
    vstore(biases, bias);
    for (int i = 0; i < n; i++) quantize_group<N, BITS>(a, g + i, scales[i], biases[i], squares);
  }
  squares.store(a.errors);
}

template <Number N>
static inline void quantize_numbers(const Quantize& a, int64_t begin, int64_t end) {
  switch (a.bits) {
    case 2: return quantize_groups<N, 2>(a, begin, end);
    case 3: return quantize_groups<N, 3>(a, begin, end);
    case 4: return quantize_groups<N, 4>(a, begin, end);
    case 5: return quantize_groups<N, 5>(a, begin, end);
    case 6: return quantize_groups<N, 6>(a, begin, end);
    default: return quantize_groups<N, 8>(a, begin, end);
  }
}

// Groups begin .. end, counted over the whole matrix.
static void quantize(const Quantize& a, int64_t begin, int64_t end) {
  if (a.number == Number::f32) quantize_numbers<Number::f32>(a, begin, end);
  else if (a.number == Number::f16) quantize_numbers<Number::f16>(a, begin, end);
  else quantize_numbers<Number::bf16>(a, begin, end);
}

}  // namespace KERNELS
