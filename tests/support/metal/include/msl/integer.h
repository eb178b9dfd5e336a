// Integer functions.
#pragma once
#include "msl/types.h"

namespace metal {

MSL_INLINE uint popcount(uint x) {
  return __builtin_popcount(x);
}
MSL_INLINE int popcount(int x) {
  return __builtin_popcount(uint(x));
}
MSL_INLINE ulong popcount(ulong x) {
  return __builtin_popcountl(x);
}
MSL_INLINE uint clz(uint x) {
  return x ? __builtin_clz(x) : 32;
}
MSL_INLINE int clz(int x) {
  return x ? __builtin_clz(uint(x)) : 32;
}
MSL_INLINE ulong clz(ulong x) {
  return x ? __builtin_clzl(x) : 64;
}
MSL_INLINE uint ctz(uint x) {
  return x ? __builtin_ctz(x) : 32;
}
MSL_INLINE int ctz(int x) {
  return x ? __builtin_ctz(uint(x)) : 32;
}
MSL_INLINE ulong ctz(ulong x) {
  return x ? __builtin_ctzl(x) : 64;
}
MSL_INLINE uint reverse_bits(uint x) {
  return __builtin_bitreverse32(x);
}
MSL_INLINE uint rotate(uint x, uint n) {
  n &= 31;
  return n ? (x << n) | (x >> (32 - n)) : x;
}
MSL_INLINE uint mulhi(uint x, uint y) {
  return uint((ulong(x) * y) >> 32);
}
MSL_INLINE int mulhi(int x, int y) {
  return int((long(x) * y) >> 32);
}
MSL_INLINE uint extract_bits(uint x, uint offset, uint bits) {
  if (bits == 0) return 0;
  return bits >= 32 ? x >> offset : (x >> offset) & ((1u << bits) - 1);
}
MSL_INLINE int extract_bits(int x, uint offset, uint bits) {
  return bits == 0 ? 0 : int(uint(x) << (32 - offset - bits)) >> (32 - bits);
}
MSL_INLINE uint insert_bits(uint x, uint inserted, uint offset, uint bits) {
  if (bits == 0) return x;
  const uint mask = (bits >= 32 ? ~0u : (1u << bits) - 1) << offset;
  return (x & ~mask) | ((inserted << offset) & mask);
}

}  // namespace metal
