// Weights of a panel as vectors: float32, or pairs of whole numbers.
#pragma once

#include "panels.h"
#include "simd.h"

namespace KERNELS {

using mlxserve::BLOCK;
using mlxserve::Codec;
using mlxserve::Number;
using mlxserve::PANEL;
using mlxserve::Panels;

// 8-bit floats: 4 exponent bits, 3 of mantissa, bias 7 (OCP FP8 E4M3); x: a byte per lane. Without
// arithmetic on subnormals, which takes some processors a hundred cycles.
static inline vf from_e4m3(vi x) {
  const vi magnitude = iand(x, iset(0x7f));
  const vf normal = vbits(iadd(ishl(magnitude, 20), iset(120 << 23)));
  const vf small = vsub(vbits(iadd(ishl(magnitude, 20), iset(121 << 23))), vset(0x1p-6f));
  const vf y = vselect_less(vfrom(magnitude), vset(8.0f), small, normal);
  return vbits(ior(ibits(y), ishl(iand(x, iset(0x80)), 24)));
}

ALWAYS_INLINE vf load_numbers(const uint8_t* p, Number kind) {
  switch (kind) {
    case Number::f32: return vload((const float*)p);
    case Number::f16: return vload_f16((const uint16_t*)p);
    case Number::bf16: return vload_bf16((const uint16_t*)p);
    case Number::e8m0: {
      // 2^(x - 127); 0 stands for 2^-127, which is a subnormal float32.
      const vi x = iload_u8(p);
      return vselect_less(vfrom(x), vset(0.5f), vset(0x1p-127f), vbits(ishl(x, 23)));
    }
    default: return from_e4m3(iload_u8(p));
  }
}

// Calls use(t, pair) for the four pairs (2 t, 2 t + 1) of weights 8 j .. 8 j + 7 of a block: 16
// lanes of two int16. A call per pair and no array of them, so that they never leave their
// registers.
template <Codec C, class F>
ALWAYS_INLINE void unpack_pairs(const uint8_t* block, int j, F&& use) {
  constexpr int bits = bits_of(C);
  const auto word = [block](int i) { return iload(block + i * 4 * PANEL); };
  const auto pair = [](vi x, int width, int t) {
    const int mask = (1 << width) - 1;
    return iand(ishr(x, width * t), iset(mask | mask << 16));
  };
  if constexpr (bits == 8) {
    const vi first = word(2 * j), second = word(2 * j + 1);
    UNROLL
    for (int t = 0; t < 4; t++) use(t, pair(t < 2 ? first : second, 8, t % 2));
  } else {
    constexpr bool has4 = bits >= 4, has2 = bits == 2 || bits == 3 || bits == 6, has1 = bits % 2;
    constexpr int twos_at = has4 ? 4 : 0, ones_at = twos_at + (has2 ? 2 : 0);
    const vi fours = has4 ? word(j) : iset(0);
    const vi twos = has2 ? ishr(word(twos_at + j / 2), 8 * (j % 2)) : iset(0);
    const vi ones = has1 ? ishr(word(ones_at), 4 * j) : iset(0);
    UNROLL
    for (int t = 0; t < 4; t++) {
      vi q = iset(0);
      if constexpr (has4) q = pair(fours, 4, t);
      if constexpr (has2) q = has4 ? ior(q, ishl(pair(twos, 2, t), 4)) : pair(twos, 2, t);
      if constexpr (has1) q = ior(q, ishl(pair(ones, 1, t), has4 ? 4 : 2));
      if constexpr (!mlxserve::is_affine(C)) q = ilookup_pairs(mlxserve::E2M1, q);
      use(t, q);
    }
  }
}

// Weights of one k as float32. `group`: where its group begins; k counts from there.
template <Codec C>
ALWAYS_INLINE vf load_weights(const uint8_t* group, int64_t k) {
  if constexpr (C == Codec::f32) return vload((const float*)group + k * PANEL);
  else if constexpr (C == Codec::f16) return vload_f16((const uint16_t*)group + k * PANEL);
  else if constexpr (C == Codec::bf16) return vload_bf16((const uint16_t*)group + k * PANEL);
  else {
    static_assert(C == Codec::mxfp8);
    const vi word = iload(group + PANEL + k / 4 * 4 * PANEL);
    // Of each word's four bytes, the even k of a pair lies 16 bits below the odd one.
    const vi byte = iand(ishr(word, (int)(k % 4 / 2 * 8 + k % 2 * 16)), iset(255));
    return vmul(from_e4m3(byte), load_numbers(group, Number::e8m0));
  }
}

// Weights k_begin .. k_end of a panel into out [k_end - k_begin, 16].
template <Codec C>
static void unpack_floats(const Panels& w, const uint8_t* panel, int64_t k_begin, int64_t k_end,
                          float* out) {
  for (int64_t k = k_begin; k < k_end; k++, out += PANEL)
    vstore(out, load_weights<C>(panel + k / w.group * w.group_bytes(), k % w.group));
}

// Groups begin .. end of a panel: pairs [weights / 2, 16], scales and biases [groups, 16] in
// float32.
template <Codec C>
static void unpack_groups(const Panels& w, const uint8_t* panel, int64_t begin, int64_t end,
                          int32_t* pairs, float* scales, float* biases) {
  constexpr int block_bytes = BLOCK * PANEL * bits_of(C) / 8;
  for (int64_t g = begin; g < end; g++, scales += PANEL, biases += PANEL) {
    const uint8_t* at = panel + g * w.group_bytes();
    vstore(scales, vmul(load_numbers(at, w.scales), vset(w.step())));
    if (w.biases) vstore(biases, load_numbers(at + PANEL * bytes_of(w.scales), w.scales));
    at += w.header_bytes();
    for (int j = 0; j < w.group / 8; j++, pairs += 4 * PANEL)
      unpack_pairs<C>(at + j / 4 * block_bytes, j % 4,
                      [pairs](int t, vi pair) { memcpy(pairs + t * PANEL, &pair, sizeof pair); });
  }
}

// Calls f with the codec as a constant: f.template operator()<C>().
template <class F>
ALWAYS_INLINE void with_codec(Codec codec, F&& f) {
  switch (codec) {
    case Codec::f32: return f.template operator()<Codec::f32>();
    case Codec::f16: return f.template operator()<Codec::f16>();
    case Codec::bf16: return f.template operator()<Codec::bf16>();
    case Codec::mxfp8: return f.template operator()<Codec::mxfp8>();
    case Codec::q2: return f.template operator()<Codec::q2>();
    case Codec::q3: return f.template operator()<Codec::q3>();
    case Codec::q4: return f.template operator()<Codec::q4>();
    case Codec::q5: return f.template operator()<Codec::q5>();
    case Codec::q6: return f.template operator()<Codec::q6>();
    case Codec::q8: return f.template operator()<Codec::q8>();
    case Codec::mxfp4: return f.template operator()<Codec::mxfp4>();
    case Codec::nvfp4: return f.template operator()<Codec::nvfp4>();
  }
}

}  // namespace KERNELS
