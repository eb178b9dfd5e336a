// What attention over paged keys and values works on. Plain structs: kernels include this.
#pragma once

#include <stdint.h>

#include "panels.h"

namespace mlxserve {

// Page i of a sequence holds positions P i .. P i + P - 1. P is a power of two within these.
constexpr int MIN_PAGE = 4, MAX_PAGE = 64;

// One row of a step: n queries at positions start .. start + n. It has pages 0 .. kept of its
// sequence, and those from base_page on; their ids lie in this order.
struct PagedRow {
  int32_t first;  // its first token in q
  int32_t n, start;
  int32_t base_page;
  int32_t sealed;    // how many of its pages, the oldest, lie in the pool; the rest are hot
  int32_t pages_at;  // where its page ids begin
  int32_t kept;      // 0 where no page is missing before base_page

  // Where a page's id lies among the row's.
  ALWAYS_INLINE int64_t index_of(int64_t page) const {
    return page < kept ? page : page - base_page + kept;
  }
};

// How a head's page lies in a pool: numbers of the cache's type [P, dim], where bits is 0. Else
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
  const void *hot_k, *hot_v;  // [hot pages * P, kv_heads, dim]
  PagePool pool_k, pool_v;
  const PagedRow* rows;
  const int32_t* pages;  // of all rows, end to end
  const float* sinks;    // [q_heads] or null
  Number cache;          // of hot pages and plain pools: f32, f16 or bf16
  float scale, softcap;  // softcap: 0 for none
  int64_t window;        // tokens, the query's own among them; 0 for none
  int64_t keep;          // the first tokens, which are seen beside the window; 0 without a window
  int q_heads, kv_heads, dim;
  int page_tokens;  // P

  ALWAYS_INLINE int group() const { return q_heads / kv_heads; }
  ALWAYS_INLINE int padded() const { return (dim + PANEL - 1) / PANEL * PANEL; }
  // The first position after the kept ones that the query at `position` sees.
  ALWAYS_INLINE int64_t low(int64_t position) const {
    const int64_t first = window && position >= window ? position - window + 1 : 0;
    return first > keep ? first : keep;
  }
};

// Queries that share their keys: of one row and one head of keys, numbers begin .. end of n *
// group, token by token. Their keys lie in blocks: first those of pages 0 .. kept_blocks, of which
// only the kept tokens are seen, then those of pages from window_page on, of which only the others
// are. So a page that has both is done twice, and what a query sees of a block has no gap. The
// part's own are block_begin .. block_end.
struct AttentionPart {
  int32_t row, head, begin, end, kept_blocks, window_page, block_begin, block_end;

  ALWAYS_INLINE int queries() const { return end - begin; }
  ALWAYS_INLINE int64_t page_of(int64_t block) const {
    return block < kept_blocks ? block : block - kept_blocks + window_page;
  }
};

constexpr int PART_QUERIES = 96;  // in a part at the most

// What one block gives for one query: sum of p * v, then the largest score and the sum of p, where
// p = exp(score - largest).
ALWAYS_INLINE int64_t partial_floats(const Attention& a) {
  return a.padded() + 2;
}

constexpr int VALUE_PANEL =
    (MAX_PAGE + 1) * PANEL;  // one line more than a page, so that panels don't collide

// Room that `attend` and `merge` need, in floats.
ALWAYS_INLINE int64_t scratch_floats(const Attention& a) {
  const int64_t padded = a.padded(), keys = padded * MAX_PAGE,
                values = padded / PANEL * VALUE_PANEL;
  return keys + values + PART_QUERIES * (MAX_PAGE + padded + 2 * partial_floats(a));
}

}  // namespace mlxserve
