// Small floating-point formats as float32, one at a time; for code that isn't worth a vector.
#pragma once

#include <stdint.h>
#include <string.h>

// Never a symbol of its own: the linker keeps one copy, which might be the one with AVX
// instructions.
#define ALWAYS_INLINE __attribute__((always_inline)) inline

namespace mlxserve {

ALWAYS_INLINE float float_of(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
ALWAYS_INLINE uint32_t bits_of_float(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return bits;
}

ALWAYS_INLINE float f16_value(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);  // infinity, NaN
  // Scaled by 2^-112 the exponent is right; the multiplication undoes it, for subnormals too.
  return float_of(sign | bits_of_float(float_of(rest << 13) * 0x1p112f));
}

// Rounds half to even, like the hardware.
ALWAYS_INLINE uint16_t f16_bits(float x) {
  const uint32_t bits = bits_of_float(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x3ff));
  if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (rest < 0x38800000)  // a subnormal: let float addition round it at 2^-24
    return (uint16_t)(sign | (bits_of_float(float_of(rest) + 0.5f) - 0x3f000000));
  return (uint16_t)(sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13));
}

ALWAYS_INLINE float bf16_value(uint16_t h) {
  return float_of((uint32_t)h << 16);
}

// Rounds half to even; NaN stays NaN.
ALWAYS_INLINE uint16_t bf16_bits(float x) {
  const uint32_t bits = bits_of_float(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// 4 exponent bits, 3 of mantissa, bias 7 (OCP FP8 E4M3).
ALWAYS_INLINE float e4m3_value(uint8_t x) {
  const uint32_t sign = (uint32_t)(x & 0x80) << 24, rest = x & 0x7f;
  const float y = rest < 8 ? rest * 0x1p-9f : float_of((rest << 20) + (120 << 23));
  return float_of(sign | bits_of_float(y));
}

// Rounds half to even, and what is too large to 448, the largest; x may not be negative.
ALWAYS_INLINE uint8_t e4m3_bits(float x) {
  const uint32_t bits = bits_of_float(x);
  if (!(x < 448)) return 0x7e;
  // A subnormal: let float addition round it at 2^-9.
  if (x < 0x1p-6f) return (uint8_t)(bits_of_float(x + 0x1p14f) - (141 << 23));
  return (uint8_t)((bits - (120 << 23) + 0x7ffff + (bits >> 20 & 1)) >> 20);
}

// A power of two: 2^(x - 127). 0 stands for 2^-127, which is a subnormal float32.
ALWAYS_INLINE float e8m0_value(uint8_t x) {
  return x ? float_of((uint32_t)x << 23) : 0x1p-127f;
}

}  // namespace mlxserve
