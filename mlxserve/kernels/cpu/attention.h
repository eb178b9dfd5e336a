// Softmax attention over pages, with an order of summation that depends on positions alone.
//
// Scores add up over d in ascending order. A block, which is what is seen of a page, gives each
// query its largest score, its sum of exponentials (one tree over 64 lanes) and its sum of p * v, in
// order of tokens; blocks are merged in ascending order. None of it depends on which queries are
// computed together, nor on whether blocks are merged as they come (`attend` with no partials) or
// later (`merge`).
//
// Tokens that a query doesn't see are never part of any sum: not even times zero, for there may be
// anything in their place.
#pragma once

#include "pages.h"

namespace KERNELS {

using mlxserve::Attention;
using mlxserve::AttentionPart;
using mlxserve::PART_QUERIES;

constexpr int PAGE_VECTORS = MAX_PAGE / LANES;

// ---- Products: rows x [R, count] times panels [count, 16], added to out.

template <int R, int P>
static inline void product(const float* x, int64_t x_stride, const float* panels,
                           int64_t panel_stride, int count, float* out, int64_t out_stride) {
  vf acc[P][R];
  UNROLL
  for (int p = 0; p < P; p++) UNROLL
  for (int r = 0; r < R; r++) acc[p][r] = vload(out + r * out_stride + p * LANES);
  for (int k = 0; k < count; k++) {
    vf w[P];
    UNROLL
    for (int p = 0; p < P; p++) w[p] = vload(panels + p * panel_stride + k * LANES);
    UNROLL
    for (int r = 0; r < R; r++) {
      const vf xk = vset(x[r * x_stride + k]);
      UNROLL
      for (int p = 0; p < P; p++) acc[p][r] = vfma(xk, w[p], acc[p][r]);
    }
  }
  UNROLL
  for (int p = 0; p < P; p++) UNROLL
  for (int r = 0; r < R; r++) vstore(out + r * out_stride + p * LANES, acc[p][r]);
}

// Panels side by side for R rows: enough chains to hide the latency of the multiply-add.
constexpr int panels_beside(int rows) {
  return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
}

template <int R, int P>
static inline void few_rows(const float* x, int64_t x_stride, const float* panels,
                            int64_t panel_stride, int n_panels, int count, float* out,
                            int64_t out_stride) {
  int done = 0;
  for (; done + P <= n_panels; done += P)
    product<R, P>(x, x_stride, panels + done * panel_stride, panel_stride, count,
                  out + done * LANES, out_stride);
  if constexpr (P > 1)
    few_rows<R, P / 2>(x, x_stride, panels + done * panel_stride, panel_stride, n_panels - done,
                       count, out + done * LANES, out_stride);
}

template <int R>
static inline void rows_at_most(int rows, const float* x, int64_t x_stride, const float* panels,
                                int64_t panel_stride, int n_panels, int count, float* out,
                                int64_t out_stride) {
  if (rows == R)
    few_rows<R, panels_beside(R)>(x, x_stride, panels, panel_stride, n_panels, count, out,
                                  out_stride);
  else if constexpr (R > 1)
    rows_at_most<R - 1>(rows, x, x_stride, panels, panel_stride, n_panels, count, out, out_stride);
}

// How many of `rows` to take at once: evenly, so that 8 become 4 + 4.
static inline int rows_now(int rows) {
  const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  return (rows + tiles - 1) / tiles;
}

// ---- One block for the queries of a part.

struct Span {
  int begin, end;  // the tokens of a page that a query sees
};

ALWAYS_INLINE int clamped(int64_t x, int most) {
  return (int)(x < 0 ? 0 : x > most ? most : x);
}

static inline Span seen(const Attention& a, const AttentionPart& part, int query, int64_t block) {
  const int64_t position = a.rows[part.row].start + query / a.group();
  const int64_t page = part.page_of(block) * a.page_tokens;
  const bool kept = block < part.kept_blocks;
  const int64_t low = kept ? 0 : a.low(position);
  const int64_t high = kept && position >= a.keep ? a.keep : position + 1;
  return {clamped(low - page, a.page_tokens), clamped(high - page, a.page_tokens)};
}

static const float LANE[MAX_PAGE] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
    22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
    44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

// scores [64] become exp(score - largest), 0 where unseen; into_largest and into_sum get their two
// numbers.
static inline void weigh(float* scores, Span span, float softcap, float* into_largest,
                         float* into_sum) {
  vf s[PAGE_VECTORS];
  UNROLL
  for (int i = 0; i < PAGE_VECTORS; i++) {
    s[i] = vload(scores + i * LANES);
    if (softcap != 0) s[i] = vmul(vtanh(s[i]), vset(softcap));  // divided by it already
  }
  if (span.begin > 0 || span.end < MAX_PAGE) {
    const vf none = vset(-__builtin_inff());
    UNROLL
    for (int i = 0; i < PAGE_VECTORS; i++) {
      const vf lane = vload(LANE + i * LANES);
      s[i] = vselect_less(lane, vset((float)span.end), s[i], none);
      s[i] = vselect_less(lane, vset((float)span.begin), none, s[i]);
    }
  }
  const float largest = vmaxall(vmax(vmax(s[0], s[1]), vmax(s[2], s[3])));
  UNROLL
  for (int i = 0; i < PAGE_VECTORS; i++) {
    s[i] = vexp_negative(vsub(s[i], vset(largest)));
    vstore(scores + i * LANES, s[i]);
  }
  *into_largest = largest;
  *into_sum = vsum(vadd(vadd(s[0], s[1]), vadd(s[2], s[3])));
}

// Where the queries begin .. end, all of which see something of the page, keep what they need.
// Their partials come out at `partials`, each after the other.
struct PageWork {
  float *keys, *values;  // unpacked
  float* scores;         // [queries, 64]
  const float* q;        // [queries, padded]
  const Span* spans;
  float* partials;
  int queries;
};

static inline void score(const Attention& a, const PageWork& w, int t0, int t1) {
  const int64_t padded = a.padded();
  const int first = t0 / LANES, vectors = (t1 + LANES - 1) / LANES - first;
  memset(w.scores, 0, w.queries * MAX_PAGE * sizeof(float));
  // A panel of keys stays in the first-level cache while all queries pass it, if there are many.
  const int step = w.queries > TILE_ROWS ? 1 : vectors;
  for (int panel = 0; panel < vectors; panel += step)
    for (int r = 0, now; r < w.queries; r += now) {
      now = rows_now(w.queries - r);
      rows_at_most<TILE_ROWS>(now, w.q + r * padded, padded, w.keys + panel * padded * LANES,
                              padded * LANES, step, a.dim,
                              w.scores + r * MAX_PAGE + (first + panel) * LANES, MAX_PAGE);
    }
  const int64_t stride = partial_floats(a);
  for (int r = 0; r < w.queries; r++) {
    float* partial = w.partials + r * stride;
    weigh(w.scores + r * MAX_PAGE, w.spans[r], a.softcap, partial + padded, partial + padded + 1);
  }
}

// Sums of p * v for `rows` neighbouring queries. Spans only move forward from one query to the
// next: the tokens that all of them see are done together, those before and after query by query,
// in order.
static inline void weigh_values(const PageWork& w, int r, int rows, int panel, int n_panels,
                                int64_t stride) {
  const float *p = w.scores + r * MAX_PAGE, *values = w.values + panel * VALUE_PANEL;
  float* out = w.partials + r * stride + panel * LANES;
  const Span* spans = w.spans + r;
  int begin = spans[rows - 1].begin, end = spans[0].end;
  if (begin >= end) begin = end = MAX_PAGE;
  const auto alone = [&](int i, int from, int to) {
    if (from < to)
      rows_at_most<1>(1, p + i * MAX_PAGE + from, MAX_PAGE, values + from * LANES, VALUE_PANEL,
                      n_panels, to - from, out + i * stride, stride);
  };
  for (int i = 0; i < rows; i++)
    alone(i, spans[i].begin, begin < spans[i].end ? begin : spans[i].end);
  if (begin == end) return;
  rows_at_most<TILE_ROWS>(rows, p + begin, MAX_PAGE, values + begin * LANES, VALUE_PANEL, n_panels,
                          end - begin, out, stride);
  for (int i = 0; i < rows; i++) alone(i, end, spans[i].end);
}

static inline void one_page(const Attention& a, const PageWork& w, const Page& keys,
                            const Page& values, Ahead next) {
  const int t0 = w.spans[0].begin, t1 = w.spans[w.queries - 1].end;
  const int64_t padded = a.padded(), stride = partial_floats(a);
  load_keys(keys, t0, t1, a.dim, w.keys, values.ahead());
  score(a, w, t0, t1);
  load_values(values, t0, t1, a.dim, w.values, next);
  for (int r = 0; r < w.queries; r++) memset(w.partials + r * stride, 0, padded * sizeof(float));
  const int panels = (int)(padded / LANES), step = w.queries > TILE_ROWS ? 1 : panels;
  for (int panel = 0; panel < panels; panel += step)
    for (int r = 0, now; r < w.queries; r += now) {
      now = rows_now(w.queries - r);
      weigh_values(w, r, now, panel, step, stride);
    }
}

// ---- The running state of a query: laid out as a partial, o, m, l.

static inline void begin_state(const Attention& a, int head, float* state) {
  const int64_t padded = a.padded();
  memset(state, 0, padded * sizeof(float));
  state[padded] = a.sinks ? a.sinks[head] : -__builtin_inff();
  state[padded + 1] = a.sinks ? 1.0f : 0.0f;
}

// Adds one block's partials to the states of `count` queries.
static inline void add_partials(int64_t padded, float* states, const float* partials, int count) {
  const int64_t stride = padded + 2;
  for (int first = 0; first < count; first += LANES) {
    const int now = count - first < LANES ? count - first : LANES;
    float old[LANES] = {0}, fresh[LANES] = {0};
    float* state = states + first * stride;
    const float* partial = partials + first * stride;
    for (int i = 0; i < now; i++) {
      const float m = state[i * stride + padded], page_m = partial[i * stride + padded];
      const float new_m = m > page_m ? m : page_m;
      old[i] = m - new_m;
      fresh[i] = page_m - new_m;
      state[i * stride + padded] = new_m;
    }
    vstore(old, vexp_negative(vload(old)));
    vstore(fresh, vexp_negative(vload(fresh)));
    for (int i = 0; i < now; i++, state += stride, partial += stride) {
      const vf of_old = vset(old[i]), of_fresh = vset(fresh[i]);
      for (int64_t d = 0; d < padded; d += LANES)
        vstore(state + d, vfma(vload(state + d), of_old, vmul(vload(partial + d), of_fresh)));
      state[padded + 1] = state[padded + 1] * old[i] + partial[padded + 1] * fresh[i];
    }
  }
}

// Query `query` of a row and head of keys, in q and out.
static inline int64_t query_at(const Attention& a, const PagedRow& row, int head, int query) {
  const int group = a.group();
  return ((int64_t)(row.first + query / group) * a.q_heads + head * group + query % group) * a.dim;
}

static inline void write_out(const Attention& a, const PagedRow& row, int head, int query,
                             const float* state) {
  float* out = a.out + query_at(a, row, head, query);
  const float sum = state[a.padded() + 1];
  for (int d = 0; d < a.dim; d++) out[d] = state[d] / sum;
}

// Queries of the part, times the scale, [queries, padded].
static inline void load_queries(const Attention& a, const AttentionPart& part, float* q) {
  const float scale = a.softcap != 0 ? a.scale / a.softcap : a.scale;
  for (int query = part.begin; query < part.end; query++, q += a.padded()) {
    const float* from = a.q + query_at(a, a.rows[part.row], part.head, query);
    for (int d = 0; d < a.dim; d++) q[d] = from[d] * scale;
  }
}

// ---- The two kernels.

static void attend(const Attention& a, const AttentionPart& part, float* partials, float* scratch) {
  const PagedRow& row = a.rows[part.row];
  const int64_t padded = a.padded(), stride = partial_floats(a);
  const int queries = part.queries();
  Span spans[PART_QUERIES];
  PageWork w;
  w.keys = scratch;
  w.values = w.keys + padded * MAX_PAGE;
  w.scores = w.values + padded / LANES * VALUE_PANEL;
  float* const q = w.scores + PART_QUERIES * MAX_PAGE;
  float* const own = q + PART_QUERIES * padded;
  float* const states = own + PART_QUERIES * stride;
  load_queries(a, part, q);
  for (int i = 0; !partials && i < queries; i++)
    begin_state(a, part.head * a.group() + (part.begin + i) % a.group(), states + i * stride);
  for (int64_t block = part.block_begin; block < part.block_end; block++) {
    int first = queries, last = 0;  // the queries that see something of this block
    for (int i = 0; i < queries; i++) {
      spans[i] = seen(a, part, part.begin + i, block);
      if (spans[i].begin >= spans[i].end) continue;
      if (first > i) first = i;
      last = i + 1;
    }
    float* page_partials =
        partials ? partials + (block - part.block_begin) * queries * stride : own;
    if (first < last) {
      w.queries = last - first;
      w.q = q + first * padded;
      w.spans = spans + first;
      w.partials = page_partials + first * stride;
      const int64_t page = part.page_of(block);
      Ahead next = {nullptr, nullptr};
      if (block + 1 < part.block_end)
        next = page_of(a, a.hot_k, a.pool_k, row, part.head, part.page_of(block + 1)).ahead();
      one_page(a, w, page_of(a, a.hot_k, a.pool_k, row, part.head, page),
               page_of(a, a.hot_v, a.pool_v, row, part.head, page), next);
    }
    if (!partials && first < last)
      add_partials(padded, states + first * stride, page_partials + first * stride, last - first);
  }
  for (int i = 0; !partials && i < queries; i++)
    write_out(a, row, part.head, part.begin + i, states + i * stride);
}

static void merge(const Attention& a, const AttentionPart& part, const float* partials,
                  float* states, bool first, bool last, int64_t begin, int64_t end) {
  const PagedRow& row = a.rows[part.row];
  const int64_t padded = a.padded(), stride = partial_floats(a);
  for (int i = (int)begin; i < (int)end; i++) {
    const int query = part.begin + i;
    float* state = states + i * stride;
    if (first) begin_state(a, part.head * a.group() + query % a.group(), state);
    const float* partial = partials + i * stride;
    for (int64_t block = part.block_begin; block < part.block_end; block++) {
      const Span span = seen(a, part, query, block);
      if (span.begin < span.end) add_partials(padded, state, partial, 1);
      partial += part.queries() * stride;
    }
    if (last) write_out(a, row, part.head, query, state);
  }
}

// count float32 numbers in the cache's type.
static void to_cache(const float* x, uint16_t* out, Number type, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) {
    const int now = count - i < LANES ? (int)(count - i) : LANES;
    float lanes[LANES] = {0};
    uint16_t narrow[LANES];
    memcpy(lanes, x + i, now * sizeof(float));
    if (type == Number::f16) vstore_f16(narrow, vload(lanes));
    else vstore_bf16(narrow, vload(lanes));
    memcpy(out + i, narrow, now * sizeof(uint16_t));
  }
}

}  // namespace KERNELS
