// out = x @ w.T over panels of 16 outputs. A row gives the same bits alone and in a batch:
//
//   float weights   one chain of multiply-adds over ascending k
//   whole numbers   x is rounded to 16 bits per group, the products of a group are summed exactly
//                   in int32 (2 * 64 * 255 * 32767 at the most), and the groups in ascending order
//
// Twice as many products fit into an instruction as in float32, and a weight needs a shift and a
// mask, not a conversion and its scale. The rounding is 2^-16 of the largest x of the group.
#pragma once

#include "codecs.h"
#include "kernels.h"

namespace KERNELS {

using mlxserve::Matmul;
using mlxserve::WholeRows;

constexpr int K_BLOCK =
    256;  // unpacked weights of one panel: 16 KB of float32, half the first cache
constexpr int ROW_BLOCK = 128;  // rows of x that share an unpacked block
constexpr int AHEAD = 1024;     // bytes to prefetch ahead of a stream of weights

static inline void write_row(const Matmul& a, int64_t panel, int64_t row, vf sums) {
  const int64_t first = panel * PANEL;
  const int64_t at = (a.out_rows ? a.out_rows[row] : row) * a.w.n + first;
  if (a.w.n - first >= PANEL) {
    if (a.bias) sums = vadd(sums, vload(a.bias + first));
    return vstore(a.out + at, sums);
  }
  float lanes[PANEL];
  vstore(lanes, sums);
  for (int64_t i = 0; i < a.w.n - first; i++)
    a.out[at + i] = a.bias ? lanes[i] + a.bias[first + i] : lanes[i];
}

// ---- float weights

// Adds R rows of x over k_count weights to sums [R, 16].
template <int R>
static void float_tile(const float* x, int64_t x_stride, const float* weights, int64_t k_count,
                       float* sums) {
  vf acc[R];
  UNROLL
  for (int r = 0; r < R; r++) acc[r] = vload(sums + r * PANEL);
  for (int64_t k = 0; k < k_count; k++) {
    const vf w = vload(weights + k * PANEL);
    UNROLL
    for (int r = 0; r < R; r++) acc[r] = vfma(vset(x[r * x_stride + k]), w, acc[r]);
  }
  UNROLL
  for (int r = 0; r < R; r++) vstore(sums + r * PANEL, acc[r]);
}

template <int R>
static inline void float_rows(int rows, const float* x, int64_t x_stride, const float* weights,
                              int64_t k_count, float* sums) {
  if (rows == R) float_tile<R>(x, x_stride, weights, k_count, sums);
  else if constexpr (R > 1) float_rows<R - 1>(rows, x, x_stride, weights, k_count, sums);
}

// One row against P neighbouring panels: their chains hide the latency of the multiply-add.
template <Codec C, int P>
static void float_row(const Matmul& a, int64_t row, int64_t panel) {
  const Panels& w = a.w;
  const float* x = a.x + row * w.k;
  const int64_t panel_bytes = w.panel_bytes();
  const uint8_t* at = w.data + panel * panel_bytes;
  vf acc[P];
  UNROLL
  for (int p = 0; p < P; p++) acc[p] = vset(0);
  for (int64_t first = 0; first < w.k; first += w.group, at += w.group_bytes()) {
    for (int64_t k = 0; k < w.group; k++) {
      const vf xk = vset(x[first + k]);
      UNROLL
      for (int p = 0; p < P; p++)
        acc[p] = vfma(xk, load_weights<C>(at + p * panel_bytes, k), acc[p]);
    }
  }
  UNROLL
  for (int p = 0; p < P; p++) write_row(a, panel + p, row, acc[p]);
}

// How many rows to take next, so that tiles are even: 8 as 4 + 4, which runs faster than 6 + 2.
static inline int next_tile(int rows, int most) {
  const int tiles = (rows + most - 1) / most;
  return (rows + tiles - 1) / tiles;
}

template <Codec C>
static void float_panel(const Matmul& a, int64_t panel, int64_t row, int rows) {
  alignas(64) float unpacked[K_BLOCK * PANEL];
  alignas(64) float sums[ROW_BLOCK * PANEL];
  memset(sums, 0, rows * PANEL * sizeof(float));
  const Panels& w = a.w;
  const uint8_t* data = w.data + panel * w.panel_bytes();
  for (int64_t k = 0; k < w.k; k += K_BLOCK) {
    const int64_t end = k + K_BLOCK < w.k ? k + K_BLOCK : w.k;
    const float* weights = unpacked;
    if constexpr (C == Codec::f32) weights = (const float*)data + k * PANEL;
    else unpack_floats<C>(w, data, k, end, unpacked);
    for (int done = 0; done < rows;) {
      const int now = next_tile(rows - done, TILE_ROWS);
      float_rows<TILE_ROWS>(now, a.x + (row + done) * w.k + k, w.k, weights, end - k,
                            sums + done * PANEL);
      done += now;
    }
  }
  for (int r = 0; r < rows; r++) write_row(a, panel, row + r, vload(sums + r * PANEL));
}

// ---- whole-number weights

// Two neighbours of a row, in every lane.
ALWAYS_INLINE vi pair_of(const int16_t* x) {
  int32_t pair;
  memcpy(&pair, x, 4);
  return iset(pair);
}

// A group's exact sum, put to its place: sum + dot * (w scale * x scale) + bias * total of x.
ALWAYS_INLINE vf add_group(vf sum, vi dot, vf scale, float x_scale, const vf* bias, float x_total) {
  sum = vfma(vfrom(dot), vmul(scale, vset(x_scale)), sum);
  return bias ? vfma(*bias, vset(x_total), sum) : sum;
}

// Groups of a panel, unpacked: pairs [weights / 2, 16], scales and biases [groups, 16].
struct Unpacked {
  alignas(64) int32_t pairs[K_BLOCK / 2 * PANEL];
  alignas(64) float scales[K_BLOCK / 16 * PANEL], biases[K_BLOCK / 16 * PANEL];
  int64_t begin, end;   // which groups
  const uint8_t* next;  // what will be unpacked after them, to be fetched meanwhile
};

// R rows over unpacked groups, added to sums [R, 16].
template <int R>
static void whole_tile(const Matmul& a, int64_t row, const Unpacked& u, bool fetch, float* sums) {
  const Panels& w = a.w;
  const int32_t* pairs = u.pairs;
  const float *scales = u.scales, *biases = u.biases;
  const uint8_t* next = u.next;
  const int64_t group_bytes = w.group_bytes();
  const int64_t groups = w.k / w.group;
  const int zero = w.zero_point();
  for (int64_t g = u.begin; g < u.end; g++, scales += PANEL, biases += PANEL) {
    if (fetch)
      for (const uint8_t* stop = next + group_bytes; next < stop; next += 64) prefetch(next);
    const int16_t* x = a.whole.q + row * w.k + g * w.group;
    const int64_t x_at = row * groups + g;
    isums dot[R];
    UNROLL
    for (int r = 0; r < R; r++) dot[r] = isums_set(-zero * a.whole.sums[x_at + r * groups]);
    for (int k = 0; k < w.group; k += 2, pairs += PANEL) {
      const vi pair = iload(pairs);
      UNROLL
      for (int r = 0; r < R; r++) dot[r] = idot16(pair, pair_of(x + r * w.k + k), dot[r]);
    }
    const vf scale = vload(scales);
    const vf bias = w.biases ? vload(biases) : vset(0);
    UNROLL
    for (int r = 0; r < R; r++)
      vstore(sums + r * PANEL,
             add_group(vload(sums + r * PANEL), ilanes(dot[r]), scale,
                       a.whole.scales[x_at + r * groups], w.biases ? &bias : nullptr,
                       a.whole.totals[x_at + r * groups]));
  }
}

template <int R>
static inline void whole_rows(int rows, const Matmul& a, int64_t row, const Unpacked& u, bool fetch,
                              float* sums) {
  if (rows == R) whole_tile<R>(a, row, u, fetch, sums);
  else if constexpr (R > 1) whole_rows<R - 1>(rows, a, row, u, fetch, sums);
}

// One row, weights unpacked into registers. One panel at a time: a single stream from front to back
// of the weight, which memory serves fastest.
template <Codec C>
static void whole_row(const Matmul& a, int64_t row, int64_t panel) {
  constexpr int block_bytes = BLOCK * PANEL * bits_of(C) / 8, step_bytes = block_bytes / 4;
  const Panels& w = a.w;
  const int64_t groups = w.k / w.group, header = w.header_bytes();
  const int zero = w.zero_point();
  const uint8_t* at = w.data + panel * w.panel_bytes();
  const int16_t* x = a.whole.q + row * w.k;
  vf sums = vset(0);
  for (int64_t g = 0; g < groups; g++, at += w.group_bytes()) {
    // Two chains, as VNNI takes 5 cycles from one sum to the next. Their total is exact.
    isums dot[2] = {isums_set(-zero * a.whole.sums[row * groups + g]), isums_set(0)};
    const uint8_t* numbers = at + header;
    for (int j = 0; j < w.group / 8; j++, x += 8) {
      prefetch(numbers + j * step_bytes + AHEAD);
      if constexpr (step_bytes > 64) prefetch(numbers + j * step_bytes + AHEAD + 64);
      unpack_pairs<C>(numbers + j / 4 * block_bytes, j % 4, [&dot, x](int t, vi pair) {
        dot[t % 2] = idot16(pair, pair_of(x + 2 * t), dot[t % 2]);
      });
    }
    const vf scale = vmul(load_numbers(at, w.scales), vset(w.step()));
    vf bias = vset(0);
    if (w.biases) bias = load_numbers(at + PANEL * bytes_of(w.scales), w.scales);
    sums = add_group(sums, iadd(ilanes(dot[0]), ilanes(dot[1])), scale,
                     a.whole.scales[row * groups + g], w.biases ? &bias : nullptr,
                     a.whole.totals[row * groups + g]);
  }
  write_row(a, panel, row, sums);
}

template <Codec C>
static void whole_panel(const Matmul& a, int64_t panel, int64_t row, int rows) {
  Unpacked u;
  alignas(64) float sums[ROW_BLOCK * PANEL];
  memset(sums, 0, rows * PANEL * sizeof(float));
  const Panels& w = a.w;
  const uint8_t* data = w.data + panel * w.panel_bytes();
  const int64_t groups = w.k / w.group, step = K_BLOCK / w.group;
  for (int64_t g = 0; g < groups; g += step) {
    u.begin = g;
    u.end = g + step < groups ? g + step : groups;
    u.next = data + u.end * w.group_bytes();
    unpack_groups<C>(w, data, u.begin, u.end, u.pairs, u.scales, u.biases);
    for (int done = 0; done < rows;) {
      const int now = next_tile(rows - done, INT_TILE_ROWS);
      whole_rows<INT_TILE_ROWS>(now, a, row + done, u, done == 0, sums + done * PANEL);
      done += now;
    }
  }
  for (int r = 0; r < rows; r++) write_row(a, panel, row + r, vload(sums + r * PANEL));
}

// Rounds x to 16 bits per group.
static void to_whole(const float* x, int64_t k, int group, const WholeRows& out, int64_t row) {
  const int64_t groups = k / group;
  for (int64_t i = row * groups; i < (row + 1) * groups; i++, x += group) {
    // As integers, so that infinity and NaN count as the largest and spoil the result as they
    // should.
    vi largest = iset(0);
    for (int j = 0; j < group; j += PANEL)
      largest = imax(largest, iand(ibits(vload(x + j)), iset(0x7fffffff)));
    const float peak = vmaxall_bits(largest);
    const bool nothing = peak < 1e-33f;  // its inverse would be infinite
    const vf inverse = vset(nothing ? 0.0f : 32767.0f / peak);
    vi sum = iset(0);
    for (int j = 0; j < group; j += PANEL) {
      const vi q = vtoint(vmul(vload(x + j), inverse));
      istore_i16(out.q + i * group + j, q);
      sum = iadd(sum, q);
    }
    out.scales[i] = nothing ? 0.0f : peak / 32767.0f;
    out.sums[i] = isum(sum);
    out.totals[i] = out.scales[i] * (float)out.sums[i];
  }
}

// ---- both

template <Codec C>
static void one_row(const Matmul& a, int64_t panel, int64_t panel_end, int64_t row) {
  if constexpr (mlxserve::is_whole(C)) {
    for (; panel < panel_end; panel++) whole_row<C>(a, row, panel);
  } else {
    for (; panel + 4 <= panel_end; panel += 4) float_row<C, 4>(a, row, panel);
    for (; panel < panel_end; panel++) float_row<C, 1>(a, row, panel);
  }
}

static void matmul(const Matmul& a, int64_t panel_begin, int64_t panel_end, int64_t row_begin,
                   int64_t row_end) {
  with_codec(a.w.codec, [&]<Codec C>() {
    if (row_end - row_begin == 1) return one_row<C>(a, panel_begin, panel_end, row_begin);
    for (int64_t panel = panel_begin; panel < panel_end; panel++) {
      for (int64_t row = row_begin; row < row_end; row += ROW_BLOCK) {
        const int rows = (int)(row_end - row < ROW_BLOCK ? row_end - row : ROW_BLOCK);
        if constexpr (mlxserve::is_whole(C)) whole_panel<C>(a, panel, row, rows);
        else float_panel<C>(a, panel, row, rows);
      }
    }
  });
}

}  // namespace KERNELS
