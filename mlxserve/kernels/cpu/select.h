// Choosing tokens from rows of logits without sorting them.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace KERNELS {

using mlxserve::Filter;
using mlxserve::Greedy;
using mlxserve::Select;

static inline vf load_padded(const float* p, int count, float pad) {
  if (count == LANES) return vload(p);
  float lanes[LANES];
  for (int i = 0; i < LANES; i++) lanes[i] = i < count ? p[i] : pad;
  return vload(lanes);
}

static inline int lanes_at(int64_t i, int64_t n) {
  return n - i < LANES ? (int)(n - i) : LANES;
}

struct Best {
  float value;
  int64_t index;
  bool finite;  // whether all of the row's numbers are
};

// The highest number of a row and where it first stands. NaN is passed over.
static inline Best row_best(const float* x, int64_t n) {
  constexpr int64_t chunk = 1024;  // searched once more for the place
  float best = -__builtin_inff();
  int64_t first = 0;
  vf strange = vset(0);  // 0 * x is NaN where x isn't finite
  for (int64_t at = 0; at < n; at += chunk) {
    const int64_t end = at + chunk < n ? at + chunk : n;
    vf high = vset(-__builtin_inff());
    for (int64_t i = at; i < end; i += LANES) {
      const vf v = load_padded(x + i, lanes_at(i, end), x[i]);
      high = vmax(v, high);
      strange = vfma(v, vset(0), strange);
    }
    const float highest = vmaxall(high);
    if (highest > best) best = highest, first = at;
  }
  int64_t index = first;
  while (index < n && x[index] != best) index++;
  return {best, index < n ? index : 0, vsum(strange) == 0};
}

static void greedy(const Greedy& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const Best best = row_best(a.logits + row * a.vocab, a.vocab);
    a.ids[row] = (int32_t)best.index;
    a.finite[row] = best.finite;
  }
}

// A row over its temperature, the likeliest at 0.
struct ScaledRow {
  const float* logits;
  int64_t n;
  float highest, temperature;

  ALWAYS_INLINE vf at(int64_t i, int count) const {
    const vf x = load_padded(logits + i, count, -__builtin_inff());
    return vdiv(vsub(x, vset(highest)), vset(temperature));
  }
};

// What is kept: scaled logits above `lowest`, and those equal to it up to index `last`.
struct Cut {
  float lowest;
  int64_t last;
  uint64_t weight;  // of all that is kept
};

// How far a scaled logit lies below 0, in an order of integers: its bits without the sign. Found
// digit by digit, from the top.
struct Digit {
  int shift, bits;
};
static constexpr Digit DIGITS[] = {{21, 10}, {10, 11}, {0, 10}};

struct Histogram {
  uint32_t counts[2048];
  uint64_t weights[2048];  // sums of exp(x) in units of 2^-40: integers add up alike in any order
};

static inline void depths_at(vf x, uint32_t depths[LANES]) {
  const vi bits = iand(ibits(x), iset(0x7fffffff));
  memcpy(depths, &bits, sizeof bits);
}

// Of the tokens whose depth begins with `prefix`, by their next digit. weigh: false leaves the
// weights at 0, which saves their exponentials.
static inline void count_digits(const ScaledRow& row, Digit digit, uint32_t prefix, bool weigh,
                                Histogram& h) {
  memset(&h, 0, sizeof h);
  const uint32_t mask = (1u << digit.bits) - 1;
  const int above = digit.shift + digit.bits;
  for (int64_t i = 0; i < row.n; i += LANES) {
    const int count = lanes_at(i, row.n);
    const vf x = row.at(i, count);
    uint32_t depths[LANES];
    depths_at(x, depths);
    uint32_t any = 0;
    for (int j = 0; j < LANES; j++) any |= (depths[j] >> above) == prefix;
    if (!any) continue;
    float weights[LANES] = {0};
    if (weigh) vstore(weights, vfma(vexp(x), vset(0x1p40f), vset(0.5f)));
    for (int j = 0; j < count; j++) {
      if (depths[j] >> above != prefix) continue;
      const uint32_t d = depths[j] >> digit.shift & mask;
      h.counts[d]++;
      h.weights[d] += (uint64_t)(int64_t)weights[j];
    }
  }
}

// Index of the nth token (from 1) of exactly this depth.
static inline int64_t nth_of_depth(const ScaledRow& row, uint32_t depth, int64_t nth) {
  for (int64_t i = 0; i < row.n; i += LANES) {
    const int count = lanes_at(i, row.n);
    uint32_t depths[LANES];
    depths_at(row.at(i, count), depths);
    for (int j = 0; j < count; j++)
      if (depths[j] == depth && --nth == 0) return i + j;
  }
  return row.n;
}

// Keeps the likeliest tokens, equal ones by index: at most `most`, and none that is preceded by
// `weight` or more. `all`: the row's first digits, with weights if `weigh`.
static inline Cut cut_row(const ScaledRow& row, const Histogram& all, bool weigh, uint64_t most,
                          uint64_t weight) {
  Histogram deeper;
  const Histogram* h = &all;
  uint32_t prefix = 0;
  uint64_t before = 0, weight_before = 0;
  for (const Digit digit : DIGITS) {
    if (digit.shift != DIGITS[0].shift) {
      count_digits(row, digit, prefix, weigh, deeper);
      h = &deeper;
    }
    const uint32_t end = 1u << digit.bits;
    uint32_t d = 0;
    for (; d < end; d++) {
      if (before + h->counts[d] >= most || weight_before + h->weights[d] >= weight) break;
      before += h->counts[d];
      weight_before += h->weights[d];
    }
    if (d == end) return {-__builtin_inff(), row.n, weight_before};
    prefix = prefix << digit.bits | d;
  }
  // The tokens at the border are equal: some of them stay.
  const uint32_t d = prefix & 1023;
  const uint64_t equal = h->counts[d], each = h->weights[d] / equal;
  const uint64_t room = each ? (weight - weight_before - 1) / each + 1 : equal;
  uint64_t stay = equal < most - before ? equal : most - before;
  if (room < stay) stay = room;
  float depth;
  memcpy(&depth, &prefix, sizeof depth);
  const int64_t last = stay == equal ? row.n : nth_of_depth(row, prefix, (int64_t)stay);
  return {-depth, last, weight_before + stay * each};
}

// Top-k, then top-p of what that keeps.
static inline Cut cut_by(const ScaledRow& row, const Filter& f) {
  const bool by_rank = f.top_k > 0 && f.top_k < row.n, by_weight = f.top_p < 1;
  if (!by_rank && !by_weight) return {-__builtin_inff(), row.n, 0};
  const uint64_t most = by_rank ? (uint64_t)f.top_k : (uint64_t)row.n + 1;
  Histogram all;
  count_digits(row, DIGITS[0], 0, by_weight, all);
  const Cut ranked = cut_row(row, all, by_weight, most, ~0ull);
  if (!by_weight) return ranked;
  const double share = __builtin_ceil((double)f.top_p * (double)ranked.weight);
  return cut_row(row, all, true, most, share < 1 ? 1 : (uint64_t)share);
}

// Scaled logits that are kept, -infinity elsewhere.
static inline vf kept_at(const ScaledRow& row, const Cut& cut, float min_p, int64_t i, int count) {
  const vf nothing = vset(-__builtin_inff()), x = row.at(i, count);
  vf kept = vselect_less(x, vset(cut.lowest), nothing, x);
  if (i + count - 1 > cut.last) {
    float lanes[LANES];
    vstore(lanes, kept);
    for (int j = 0; j < LANES; j++)
      if (i + j > cut.last && lanes[j] == cut.lowest) lanes[j] = -__builtin_inff();
    kept = vload(lanes);
  }
  if (min_p <= 0 || vmaxall(kept) == -__builtin_inff()) return kept;
  return vselect_less(vexp(kept), vset(min_p), nothing, kept);
}

// log of a positive normal number to 1 unit in the last place. Cephes' polynomial.
static inline vf vlog(vf x) {
  const vi bits = ibits(x);
  const vf m = vbits(ior(iand(bits, iset(0x7fffff)), iset(0x3f000000)));  // 0.5 .. 1
  const vf e = vfrom(isub(ishr(bits, 23), iset(126)));
  const vf half = vset(0.70710678f);
  const vf exponent = vselect_less(m, half, vsub(e, vset(1)), e);
  const vf r = vsub(vselect_less(m, half, vadd(m, m), m), vset(1));
  const vf z = vmul(r, r);
  const float c[] = {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                     -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
  vf p = vset(7.0376836292e-2f);
  for (const float coefficient : c) p = vfma(p, r, vset(coefficient));
  p = vmul(vmul(p, r), z);
  p = vfma(exponent, vset(-2.12194440e-4f), p);
  p = vfma(vset(-0.5f), z, p);
  return vfma(exponent, vset(0.693359375f), vadd(r, p));
}

static inline vi rotate_left(vi x, int n) {
  return ior(ishl(x, n), ishr(x, 32 - n));
}

// Threefry-2x32 of 20 rounds (Salmon et al. 2011), as mx.random has it: two words of two counters.
static inline void threefry(const uint32_t key[2], vi& a, vi& b) {
  constexpr int turns[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1bd11bda};
  a = iadd(a, iset((int32_t)keys[0]));
  b = iadd(b, iset((int32_t)keys[1]));
  UNROLL
  for (int round = 0; round < 5; round++) {
    UNROLL
    for (int i = 0; i < 4; i++) {
      a = iadd(a, b);
      b = ixor(rotate_left(b, turns[round % 2][i]), a);
    }
    a = iadd(a, iset((int32_t)keys[(round + 1) % 3]));
    b = iadd(b, iset((int32_t)(keys[(round + 2) % 3] + (uint32_t)round + 1)));
  }
}

// The token whose value plus Gumbel noise is highest, the lower index among equals.
struct Draw {
  float best;
  int64_t index;

  void consider(vf values, vi bits, int64_t first) {
    // The uniform number of mx.random: bits / 2^32, below 1. Not 0, so that all noise is finite.
    const vf whole = vfma(vfrom(ishr(bits, 16)), vset(65536), vfrom(iand(bits, iset(0xffff))));
    const vf u = vmax(vmin(vmul(whole, vset(0x1p-32f)), vset(0x1.fffffep-1f)), vset(0x1p-33f));
    const vf noise = vsub(vset(0), vlog(vsub(vset(0), vlog(u))));
    const vf noisy = vadd(values, noise);
    if (!(vmaxall(noisy) >= best)) return;
    float lanes[LANES];
    vstore(lanes, noisy);
    for (int j = 0; j < LANES; j++) {
      if (!(lanes[j] > best || (lanes[j] == best && first + j < index))) continue;
      best = lanes[j];
      index = first + j;
    }
  }
};

static inline vi counters(int64_t first) {
  static const int32_t lanes[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return iadd(iload(lanes), iset((int32_t)first));
}

// One draw from softmax of what is kept: the Gumbel maximum, with mx.random.categorical's noise.
// Noise for token i comes in one pair with that for i + half.
static inline int64_t draw_token(const ScaledRow& row, const Cut& cut, const Filter& f,
                                 int64_t likeliest) {
  const float nothing = -__builtin_inff();
  const int64_t half = row.n / 2, odd = row.n % 2;
  Draw draw = {-3.4028235e38f, likeliest};
  for (int64_t i = 0; i < half; i += LANES) {
    const int count = lanes_at(i, half);
    const int64_t second = half + odd + i;
    const vf low = kept_at(row, cut, f.min_p, i, count);
    const vf high = kept_at(row, cut, f.min_p, second, count);
    if (vmaxall(vmax(low, high)) == nothing) continue;
    vi a = counters(i), b = counters(second);
    threefry(f.key, a, b);
    draw.consider(low, a, i);
    draw.consider(high, b, second);
  }
  if (odd) {
    vi a = iset((int32_t)half), b = iset(0);
    threefry(f.key, a, b);
    draw.consider(kept_at(row, cut, f.min_p, half, 1), a, half);
  }
  return draw.index;
}

static void select(const Select& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; r++) {
    const Filter& f = a.filters[r];
    const float* logits = a.logits + r * a.vocab;
    const Best best = row_best(logits, a.vocab);
    const ScaledRow row = {logits, a.vocab, best.value, f.temperature};
    const Cut cut = cut_by(row, f);
    if (a.ids) a.ids[r] = (int32_t)draw_token(row, cut, f, best.index);
    if (!a.filtered) continue;
    for (int64_t i = 0; i < a.vocab; i += LANES) {
      float lanes[LANES];
      const int count = lanes_at(i, a.vocab);
      vstore(lanes, kept_at(row, cut, f.min_p, i, count));
      memcpy(a.filtered + r * a.vocab + i, lanes, count * sizeof(float));
    }
  }
}

}  // namespace KERNELS
