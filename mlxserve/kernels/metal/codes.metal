// N vectors to a simdgroup's threadgroup memory, front to back.
template <int N>
inline void stage(threadgroup uint4* to, const device uint4* from, int lane) {
  UNROLL for (int n = 0; n < (N + 31) / 32; n++) {
    const int i = n * 32 + lane;
    if (N % 32 == 0 || i < N) to[i] = from[i];
  }
}

// N times four scales and as many biases; a word there holds a scale and its bias.
template <int N>
inline void stage_affine(
    threadgroup uint4* to, const device uint2* scales, const device uint2* biases, int lane) {
  UNROLL for (int n = 0; n < (N + 31) / 32; n++) {
    const int i = n * 32 + lane;
    if (N % 32 == 0 || i < N) {
      const uint2 scale = scales[i];
      const uint2 bias = biases[i];
      const uint2 even = (scale & 0xffffu) | (bias << 16);
      const uint2 odd = (scale >> 16) | (bias & 0xffff0000u);
      to[i] = uint4(even.x, odd.x, even.y, odd.y);
    }
  }
}

// The i-th two codes.
template <int BITS>
inline float2 two_codes(const threadgroup uint4* codes, int i);

template <>
inline float2 two_codes<8>(const threadgroup uint4* codes, int i) {
  const uint both = ((const threadgroup ushort*)codes)[i];
  return float2(float(both & 255u), float(both >> 8));
}

template <>
inline float2 two_codes<4>(const threadgroup uint4* codes, int i) {
  const uint both = ((const threadgroup uchar*)codes)[i];
  return float2(float(both & 15u), float(both >> 4));
}

// The i-th four codes.
template <int BITS>
inline float4 four_codes(const threadgroup uint4* codes, int i);

template <>
inline float4 four_codes<8>(const threadgroup uint4* codes, int i) {
  return split<8>(((const threadgroup uint*)codes)[i]);
}

template <>
inline float4 four_codes<4>(const threadgroup uint4* codes, int i) {
  return split<4>(((const threadgroup ushort*)codes)[i]);
}
