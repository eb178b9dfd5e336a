// What attention over paged keys and values works on. Plain structs: kernels include this.
#pragma once

#include <stdint.h>

#include "panels.h"

namespace mlxserve {

constexpr int PAGE = 64;  // tokens; page i of a sequence holds positions 64 i .. 64 i + 63

// One row of a step: n queries at positions start .. start + n.
struct PagedRow {
  int32_t first;  // its first token in q
  int32_t n, start;
  int32_t base_page;  // the oldest page that it still has
  int32_t sealed;     // how many of its pages, from base_page on, lie in the pool; the rest are hot
  int32_t pages_at;   // where its page ids begin
};

// How a head's page lies in a pool: numbers of the cache's type [PAGE, dim], where bits is 0. Else
// groups of codes, low bits first, each with a scale and a bias (see kernels/pages.py): of keys, one
// for each channel; of values, `VALUE_GROUP` channels of a token.
struct PageFormat {
  int bits, group, groups;

  ALWAYS_INLINE int64_t code_bytes() const { return (int64_t)groups * group * bits / 8; }
};
constexpr int VALUE_GROUP = 32;

// All sealed keys or values, [pages, kv_heads] pages of a head.
struct PagePool {
  const void* data;                 // numbers or codes
  const uint16_t *scales, *biases;  // float16; null for plain numbers
  PageFormat format;
};

struct Attention {
  const float* q;             // [T, q_heads, dim]
  float* out;                 // like q
  const void *hot_k, *hot_v;  // [hot pages * PAGE, kv_heads, dim]
  PagePool pool_k, pool_v;
  const PagedRow* rows;
  const int32_t* pages;  // of all rows, end to end
  const float* sinks;    // [q_heads] or null
  Number cache;          // of hot pages and plain pools: f32, f16 or bf16
  float scale, softcap;  // softcap: 0 for none
  int64_t window;        // tokens, the query's own among them; 0 for none
  int q_heads, kv_heads, dim;

  ALWAYS_INLINE int group() const { return q_heads / kv_heads; }
  ALWAYS_INLINE int padded() const { return (dim + PANEL - 1) / PANEL * PANEL; }
  // The first position that the query at `position` sees.
  ALWAYS_INLINE int64_t low(int64_t position) const {
    return window && position >= window ? position - window + 1 : 0;
  }
};

// Queries that share their keys: of one row and one head of keys, numbers begin .. end of n *
// group, token by token. A part's keys are those of pages block_begin .. block_end.
struct AttentionPart {
  int32_t row, head, begin, end, block_begin, block_end;

  ALWAYS_INLINE int queries() const { return end - begin; }
};

constexpr int PART_QUERIES = 96;  // in a part at the most

// What one page gives for one query: sum of p * v, then the largest score and the sum of p, where p
// = exp(score - largest).
ALWAYS_INLINE int64_t partial_floats(const Attention& a) {
  return a.padded() + 2;
}

constexpr int VALUE_PANEL =
    (PAGE + 1) * PANEL;  // one line more than a page, so that panels don't collide

// Room that `attend` and `merge` need, in floats.
ALWAYS_INLINE int64_t scratch_floats(const Attention& a) {
  const int64_t padded = a.padded(), keys = padded * PAGE, values = padded / PANEL * VALUE_PANEL;
  return keys + values + PART_QUERIES * (PAGE + padded + 2 * partial_floats(a));
}

}  // namespace mlxserve
