// Left to itself, the compiler may keep the arrays that such a loop goes through in memory.
#define UNROLL _Pragma("clang loop unroll(full)")

// Two 16-bit numbers out of a word.
template <typename T>
inline float2 unpack(uint word);

template <>
inline float2 unpack<half>(uint word) {
  return float2(as_type<half2>(word));
}

template <>
inline float2 unpack<bfloat16_t>(uint word) {
  return as_type<float2>(uint2(word << 16, word & 0xffff0000u));
}

// Four codes out of a word's low bits, the lowest first.
template <int BITS>
inline float4 split(uint word);

template <>
inline float4 split<8>(uint word) {
  return float4(
      float(word & 255u), float((word >> 8) & 255u), float((word >> 16) & 255u), float(word >> 24));
}

template <>
inline float4 split<4>(uint word) {
  return float4(
      float(word & 15u), float((word >> 4) & 15u), float((word >> 8) & 15u),
      float((word >> 12) & 15u));
}

// Two numbers, rounded to the nearest, in a word.
template <typename T>
inline uint pack(float2 x);

template <>
inline uint pack<half>(float2 x) {
  return as_type<uint>(half2(x));
}

// By their bits: bfloat16 is no type of its own in every Metal.
inline uint bfloat16_bits(float x) {
  const uint bits = as_type<uint>(x);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return is_nan ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

template <>
inline uint pack<bfloat16_t>(float2 x) {
  return bfloat16_bits(x.x) | (bfloat16_bits(x.y) << 16);
}
