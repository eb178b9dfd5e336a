// How a weight [N, K] lies in memory for the matmul kernels: panels of 16 outputs, streamed from
// front to back.
//
//   dense      per k: 16 values (float32, float16 or bfloat16)
//   quantised  per group of k: 16 scales, then 16 biases if there are any, then the numbers, in
//              blocks of 32 k (a group of 16 is half a block). A block is made of planes of 32-bit
//              words, 16 lanes each; a word of a plane of b bits holds 16 / b pairs of neighbours,
//              the even k of pair t in bits b t .., the odd one 16 bits higher. So one shift and
//              one mask give a pair of int16 per lane, what multiply-add instructions take.
//              Planes, low bits first: 8; 4; 2; 4 + 2 (6 bits); 4 + 1 (5 bits); 2 + 1 (3 bits).
//
// N is filled up to a multiple of 16 with zeros. Plain structs: kernels include this.
#pragma once

#include "numbers.h"

namespace mlxserve {

enum class Codec : int { f32, f16, bf16, mxfp8, q2, q3, q4, q5, q6, q8, mxfp4, nvfp4 };
enum class Number : int { f32, f16, bf16, e8m0, e4m3 };

constexpr int PANEL = 16;
constexpr int BLOCK = 32;

ALWAYS_INLINE constexpr int bytes_of(Number n) {
  return n == Number::f32 ? 4 : n == Number::f16 || n == Number::bf16 ? 2 : 1;
}
// Bits of one weight, without scales.
ALWAYS_INLINE constexpr int bits_of(Codec c) {
  switch (c) {
    case Codec::f32: return 32;
    case Codec::f16:
    case Codec::bf16: return 16;
    case Codec::q2: return 2;
    case Codec::q3: return 3;
    case Codec::q5: return 5;
    case Codec::q6: return 6;
    case Codec::q8:
    case Codec::mxfp8: return 8;
    default: return 4;
  }
}
ALWAYS_INLINE constexpr bool is_dense(Codec c) {
  return c <= Codec::bf16;
}
ALWAYS_INLINE constexpr bool is_affine(Codec c) {
  return c >= Codec::q2 && c <= Codec::q8;
}
// Whether a weight is a small whole number times its group's scale.
ALWAYS_INLINE constexpr bool is_whole(Codec c) {
  return c >= Codec::q2;
}

// 4-bit floats (OCP FP4 E2M1), doubled and raised by 12: 0, .5, 1, 1.5, 2, 3, 4, 6 and their
// negatives.
constexpr int8_t E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

struct Panels {
  const uint8_t* data;
  int64_t n, k;
  Codec codec;
  int group;      // weights that share a scale; k for dense
  Number scales;  // of scales and biases
  bool biases;    // stored; else an affine bias is -2^(bits - 1) times the scale

  ALWAYS_INLINE int64_t panels() const { return (n + PANEL - 1) / PANEL; }
  ALWAYS_INLINE int64_t header_bytes() const {
    return is_dense(codec) ? 0 : (int64_t)PANEL * bytes_of(scales) * (biases ? 2 : 1);
  }
  ALWAYS_INLINE int64_t group_bytes() const {
    return header_bytes() + (int64_t)group * PANEL * bits_of(codec) / 8;
  }
  ALWAYS_INLINE int64_t panel_bytes() const { return k / group * group_bytes(); }
  // What the stored whole number of a weight 0 is.
  ALWAYS_INLINE int zero_point() const {
    if (!is_affine(codec)) return 12;
    return biases ? 0 : 1 << (bits_of(codec) - 1);
  }
  // A stored number times its group's scale times this is the weight.
  ALWAYS_INLINE float step() const { return is_affine(codec) ? 1.0f : 0.5f; }
};

}  // namespace mlxserve
