// A head's page of the cache as float32: keys with sixteen tokens beside each other, values in
// panels.
#pragma once

#include "codecs.h"
#include "kernels.h"
#include "transpose.h"

namespace KERNELS {

using mlxserve::Attention;
using mlxserve::bytes_of;
using mlxserve::MAX_PAGE;
using mlxserve::PagedRow;
using mlxserve::PagePool;
using mlxserve::VALUE_GROUP;
using mlxserve::VALUE_PANEL;

// What will be read next, called into the cache bit by bit while something else is worked on: the
// processor's own guesses leave half of the memory's speed unused.
struct Ahead {
  const char *at, *end;

  // Bytes to fetch each time, to be done after so many times.
  int share(int times) const { return (int)((end - at + times - 1) / times); }
  inline void fetch(int bytes) {
    for (int i = 0; i < bytes && at < end; i += 64, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// One head's keys or values of a page.
struct Page {
  const char* data;                 // of the first token, or the first code
  const uint16_t *scales, *biases;  // of packed pages
  int bits;                         // of a code; 0 for plain numbers
  Number number;                    // of those
  int tokens;                       // P
  int64_t stride;                   // between their tokens, in numbers
  int64_t bytes;                    // to read ahead: none of hot pages, they were just written

  Ahead ahead() const { return {data, data + bytes}; }
};

static inline Page page_of(const Attention& a, const void* hot, const PagePool& pool,
                           const PagedRow& row, int head, int64_t page) {
  const int64_t index = row.index_of(page), id = a.pages[row.pages_at + index];
  const int64_t item = bytes_of(a.cache), token = (int64_t)a.kv_heads * a.dim;
  const int tokens = a.page_tokens;
  if (index >= row.sealed) {
    const int64_t at = id * tokens * token + head * a.dim;
    return {(const char*)hot + at * item, nullptr, nullptr, 0, a.cache, tokens, token, 0};
  }
  const int64_t at = id * a.kv_heads + head, plain = (int64_t)tokens * a.dim * item;
  const char* data = (const char*)pool.data;
  if (pool.format.bits == 0)
    return {data + at * plain, nullptr, nullptr, 0, a.cache, tokens, a.dim, plain};
  const int64_t codes = pool.format.code_bytes(), group = at * pool.format.groups;
  return {data + at * codes,
          pool.scales + group,
          pool.biases + group,
          pool.format.bits,
          a.cache,
          tokens,
          0,
          codes};
}

// ---- Plain numbers: float32, float16 or bfloat16. Values go panel by panel: neighbouring stores
// take half the time of scattered ones.

// `count` numbers, and zeros up to 16.
ALWAYS_INLINE vf load_some(const char* p, Number number, int count) {
  if (count == LANES) return load_numbers((const uint8_t*)p, number);
  uint8_t some[LANES * sizeof(float)] = {0};
  memcpy(some, p, count * bytes_of(number));
  return load_numbers(some, number);
}

template <Number N>
static inline void load_plain_keys(const Page& page, int t0, int t1, int dim, float* out,
                                   Ahead next) {
  constexpr int item = bytes_of(N);
  const int padded = (dim + LANES - 1) / LANES * LANES;
  const int share = next.share((t1 - t0 / LANES * LANES + LANES - 1) / LANES * (padded / LANES));
  alignas(64) float rows[LANES * LANES] = {0};
  for (int first = t0 / LANES * LANES; first < t1; first += LANES, out += padded * LANES) {
    const int begin = first < t0 ? t0 : first, end = first + LANES < t1 ? first + LANES : t1;
    for (int d = 0; d < dim; d += LANES) {
      next.fetch(share);
      const int count = dim - d < LANES ? dim - d : LANES;
      const char* corner = page.data + (first * page.stride + d) * item;
      if (N == Number::f32 && count == LANES && end - begin == LANES) {
        transpose16((const float*)corner, page.stride, out + d * LANES);
        continue;
      }
      for (int t = begin; t < end; t++)
        vstore(rows + (t - first) * LANES,
               load_some(corner + (t - first) * page.stride * item, N, count));
      transpose16(rows, LANES, out + d * LANES);
    }
  }
}

template <Number N>
static inline void load_plain_values(const Page& page, int t0, int t1, int dim, float* out,
                                     Ahead next) {
  constexpr int item = bytes_of(N);
  const int share = next.share((t1 - t0) * ((dim + LANES - 1) / LANES));
  for (int d = 0; d < dim; d += LANES, out += VALUE_PANEL) {
    const int count = dim - d < LANES ? dim - d : LANES;
    const char* from = page.data + (t0 * page.stride + d) * item;
    for (int t = t0; t < t1; t++, from += page.stride * item) {
      next.fetch(share);
      vstore(out + t * LANES, load_some(from, N, count));
    }
  }
}

// ---- Packed numbers. code * scale is exact: 8 bits times 11.

template <int BITS>
static inline vf load_codes(const char* p) {
  if constexpr (BITS == 8) return vfrom(iload_u8((const uint8_t*)p));
  else return vfrom(iload_u4((const uint8_t*)p));
}

template <int BITS>
static inline void load_packed_keys(const Page& page, int t0, int t1, int dim, float* out,
                                    Ahead next) {
  constexpr int VECTOR = 2 * BITS;
  const int row = page.tokens * BITS / 8;  // bytes of a channel
  const int padded = (dim + LANES - 1) / LANES * LANES;
  const int first = t0 / LANES, vectors = (t1 + LANES - 1) / LANES - first;
  const int share = next.share(dim);
  const char* codes = page.data + first * VECTOR;
  char few[VECTOR] = {0};  // a channel that fills no vector
  for (int d = 0; d < dim; d++, codes += row, out += LANES) {
    next.fetch(share);
    const vf scale = vset(widen_f16(page.scales[d])), bias = vset(widen_f16(page.biases[d]));
    if (row < VECTOR) {
      memcpy(few, codes, row);
      vstore(out, vfma(load_codes<BITS>(few), scale, bias));
      continue;
    }
    for (int i = 0; i < vectors; i++)
      vstore(out + i * padded * LANES, vfma(load_codes<BITS>(codes + i * VECTOR), scale, bias));
  }
}

template <int BITS>
static inline void load_packed_values(const Page& page, int t0, int t1, int dim, float* out,
                                      Ahead next) {
  constexpr int VECTOR = 2 * BITS;
  const int groups = (dim + VALUE_GROUP - 1) / VALUE_GROUP;
  const int share = next.share((t1 - t0) * groups);
  for (int g = 0; g < groups; g++, out += 2 * VALUE_PANEL) {
    const bool two = dim - g * VALUE_GROUP > LANES;
    int at = t0 * groups + g;
    const char* codes = page.data + at * 2 * VECTOR;
    for (int t = t0; t < t1; t++, at += groups, codes += groups * 2 * VECTOR) {
      next.fetch(share);
      const vf scale = vset(widen_f16(page.scales[at])), bias = vset(widen_f16(page.biases[at]));
      vstore(out + t * LANES, vfma(load_codes<BITS>(codes), scale, bias));
      if (two)
        vstore(out + VALUE_PANEL + t * LANES, vfma(load_codes<BITS>(codes + VECTOR), scale, bias));
    }
  }
}

// ---- Any page.

// Tokens t0 .. t1 into out [4, padded, 16]: sixteen tokens beside each other, from the vector with
// t0 on. What lies in the lanes of other tokens is not defined.
static inline void load_keys(const Page& page, int t0, int t1, int dim, float* out, Ahead next) {
  if (page.bits == 8) return load_packed_keys<8>(page, t0, t1, dim, out, next);
  if (page.bits == 4) return load_packed_keys<4>(page, t0, t1, dim, out, next);
  switch (page.number) {
    case Number::f16: return load_plain_keys<Number::f16>(page, t0, t1, dim, out, next);
    case Number::bf16: return load_plain_keys<Number::bf16>(page, t0, t1, dim, out, next);
    default: return load_plain_keys<Number::f32>(page, t0, t1, dim, out, next);
  }
}

// Tokens t0 .. t1 into out [padded / 16] panels of [64, 16].
static inline void load_values(const Page& page, int t0, int t1, int dim, float* out, Ahead next) {
  if (page.bits == 8) return load_packed_values<8>(page, t0, t1, dim, out, next);
  if (page.bits == 4) return load_packed_values<4>(page, t0, t1, dim, out, next);
  switch (page.number) {
    case Number::f16: return load_plain_values<Number::f16>(page, t0, t1, dim, out, next);
    case Number::bf16: return load_plain_values<Number::bf16>(page, t0, t1, dim, out, next);
    default: return load_plain_values<Number::f32>(page, t0, t1, dim, out, next);
  }
}

}  // namespace KERNELS
