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
