// Keys and values in 8 or 4 bits, every bit as kernels/pages.py gives it.
#pragma once

#include "pages.h"
#include "quantize.h"

namespace KERNELS {

using mlxserve::PackPage;

constexpr float LARGEST_F16 = 65504;

// One group of 16 * VECTORS numbers.
template <int BITS, int VECTORS>
static inline void pack_group(const float* x, uint8_t* codes, uint16_t* scale, uint16_t* bias) {
  constexpr float top = (1 << BITS) - 1;
  vf low = vload(x), high = low, zeros = vset(0);
  for (int i = 0; i < VECTORS; i++) {
    const vf now = vload(x + i * LANES);
    low = vmin(low, now);
    high = vmax(high, now);
    zeros = vfma(now, vset(0), zeros);  // or NaN, where a number isn't finite
  }
  // Which of 0 and -0 is found depends on the order: + 0 makes it 0.
  const float least = -vmaxall(vsub(vset(0), low)) + 0.0f, most = vmaxall(high) + 0.0f;
  if (vsum(zeros) == 0) {
    const float step = (most - least) / top;
    *scale = mlxserve::f16_bits(step < LARGEST_F16 ? step : LARGEST_F16);
    *bias = mlxserve::f16_bits(least < -LARGEST_F16  ? -LARGEST_F16
                               : least > LARGEST_F16 ? LARGEST_F16
                                                     : least);
  } else {
    *scale = 0;
    *bias = 0x7e00;  // NaN
  }
  if (*scale == 0) {
    memset(codes, 0, VECTORS * 2 * BITS);
    return;
  }
  const vf step = vset(widen_f16(*scale)), shift = vset(widen_f16(*bias));
  for (int i = 0; i < VECTORS; i++) {
    const vf code = vround(vdiv(vsub(vload(x + i * LANES), shift), step));
    pack16<BITS>(vtoint(vmin(vmax(code, vset(0)), vset(top))), codes + i * 2 * BITS);
  }
}

// A group for each channel.
template <int BITS>
static inline void pack_keys_in(const PackPage& a) {
  const int item = bytes_of(a.number);
  const int row = a.tokens * BITS / 8;  // bytes of a channel
  alignas(64) float tokens[LANES * LANES], columns[LANES * LANES], channels[LANES][MAX_PAGE];
  uint8_t codes[MAX_PAGE * BITS / 8];
  for (int d = 0; d < a.dim; d += LANES) {
    const int count = a.dim - d < LANES ? a.dim - d : LANES;
    for (int first = 0; first < MAX_PAGE; first += LANES) {
      for (int t = 0; t < LANES; t++) {
        // The last token fills up a smaller page: it changes neither least nor most.
        const int64_t token = first + t < a.tokens ? first + t : a.tokens - 1;
        const char* from = (const char*)a.x + (token * a.stride + d) * item;
        vstore(tokens + t * LANES, load_some(from, a.number, count));
      }
      transpose16(tokens, LANES, columns);
      for (int c = 0; c < count; c++) vstore(channels[c] + first, vload(columns + c * LANES));
    }
    for (int c = 0; c < count; c++) {
      pack_group<BITS, MAX_PAGE / LANES>(channels[c], codes, a.scales + d + c, a.biases + d + c);
      memcpy(a.codes + (int64_t)(d + c) * row, codes, row);
    }
  }
}

// Groups along each token. The last channel fills up the last one.
template <int BITS>
static inline void pack_values_in(const PackPage& a) {
  const int item = bytes_of(a.number);
  uint8_t* codes = a.codes;
  uint16_t *scale = a.scales, *bias = a.biases;
  for (int t = 0; t < a.tokens; t++) {
    const char* token = (const char*)a.x + t * a.stride * item;
    for (int d = 0; d < a.dim; d += VALUE_GROUP, codes += VALUE_GROUP * BITS / 8) {
      alignas(64) float x[VALUE_GROUP];
      const int count = a.dim - d < VALUE_GROUP ? a.dim - d : VALUE_GROUP;
      for (int i = 0; i < count; i += LANES) {
        const int now = count - i < LANES ? count - i : LANES;
        vstore(x + i, load_some(token + (d + i) * item, a.number, now));
      }
      for (int i = count; i < VALUE_GROUP; i++) x[i] = x[count - 1];
      pack_group<BITS, VALUE_GROUP / LANES>(x, codes, scale++, bias++);
    }
  }
}

static void pack_keys(const PackPage& a) {
  if (a.bits == 8) pack_keys_in<8>(a);
  else pack_keys_in<4>(a);
}

static void pack_values(const PackPage& a) {
  if (a.bits == 8) pack_values_in<8>(a);
  else pack_values_in<4>(a);
}

}  // namespace KERNELS
