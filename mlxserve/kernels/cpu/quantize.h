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

constexpr int MAX_GROUP = 128;

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
  uint8_t bytes[LANES];
  istore_u8(bytes, q);
  if constexpr (BITS == 8) {
    memcpy(out, bytes, LANES);
  } else {
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

// One group: scale and bias in float32, q from those and not from what is stored.
template <Number N, int BITS>
static inline void quantize_group(const Quantize& a, int64_t g) {
  const int64_t first = g * a.group;
  alignas(64) float widened[MAX_GROUP];
  const float* w = widened;
  if constexpr (N == Number::f32) w = (const float*)a.w + first;
  else
    for (int i = 0; i < a.group; i += LANES) vstore(widened + i, load_number<N>(a.w, first + i));
  const vf infinity = vset(__builtin_inff());
  vf low = infinity, high = vsub(vset(0), infinity);
  for (int i = 0; i < a.group; i += LANES) {
    const vf x = vload(w + i);
    low = vmin(x, low);  // this way round a NaN in x is passed over
    high = vmax(x, high);
  }
  const float most = vmaxall(high), least = -vmaxall(vsub(vset(0), low));
  constexpr float top = (1 << BITS) - 1;
  float scale = (most - least) / top;
  if (!(scale > 1e-7f)) scale = 1e-7f;
  // q = 0 is the edge of larger magnitude, exactly; the step is set so that 0 is a whole q too.
  const bool negative_edge = __builtin_fabsf(least) > __builtin_fabsf(most);
  if (!negative_edge) scale = -scale;
  const float edge = negative_edge ? least : most;
  const float q0 = __builtin_rintf(edge / scale);
  float bias = 0;
  if (q0 != 0) {
    scale = edge / q0;
    bias = edge;
  }
  uint8_t* out = a.out + first * BITS / 8;
  const vf step = vset(scale), shift = vset(bias);
  for (int i = 0; i < a.group; i += LANES, out += 2 * BITS) {
    const vf q = vround(vdiv(vsub(vload(w + i), shift), step));
    pack16<BITS>(vtoint(vmin(vmax(q, vset(0)), vset(top))), out);
  }
  store_number<N>(a.scales, g, scale);
  store_number<N>(a.biases, g, bias);
}

template <Number N, int BITS>
static inline void quantize_groups(const Quantize& a, int64_t begin, int64_t end) {
  for (int64_t g = begin; g < end; g++) quantize_group<N, BITS>(a, g);
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
