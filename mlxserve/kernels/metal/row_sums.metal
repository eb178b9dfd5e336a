// The sum of x over a threadgroup of NSG simdgroups. partial: NSG numbers, of this sum alone.
template <int NSG>
inline float row_sum(float x, threadgroup float* partial, int lane, int simd_gid) {
  const float of_simdgroup = simd_sum(x);
  if (lane == 0) partial[simd_gid] = of_simdgroup;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < NSG ? partial[lane] : 0.0f);
}

inline float squares(float4 x) {
  return x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
}

// Numbers 4 * i to 4 * i + 4.
template <typename T>
inline float4 four(const device T* numbers, long i) {
  const uint2 words = ((const device uint2*)numbers)[i];
  return float4(unpack<T>(words.x), unpack<T>(words.y));
}

template <typename T>
inline void put_four(device T* numbers, long i, float4 x) {
  ((device uint2*)numbers)[i] = uint2(pack<T>(x.xy), pack<T>(x.zw));
}
