// Row by row: norms, gates, soft caps. A row's sums run in one order, whatever rows stand beside
// it.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace KERNELS {

using mlxserve::AddRmsNorm;
using mlxserve::Gate;
using mlxserve::Gated;
using mlxserve::LayerNorm;
using mlxserve::RmsNorm;
using mlxserve::SoftCap;

// `count` numbers and zeros after them; nothing beyond them is touched.
static inline vf load_some(const float* p, int count) {
  if (count == LANES) return vload(p);
  float lanes[LANES] = {0};
  memcpy(lanes, p, count * sizeof(float));
  return vload(lanes);
}

static inline void store_some(float* p, vf x, int count) {
  if (count == LANES) return vstore(p, x);
  float lanes[LANES];
  vstore(lanes, x);
  memcpy(p, lanes, count * sizeof(float));
}

// f(i, count) for blocks of 16 over 0 .. n, then for what is left.
template <class F>
ALWAYS_INLINE static void for_lanes(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) f(i, LANES);
  if (i < n) f(i, (int)(n - i));
}

// Sum of f(lanes at i) over n numbers; f must give zero for lanes beyond them. Four chains hide the
// latency of the addition.
template <class F>
ALWAYS_INLINE static float sum_lanes(int64_t n, const F& f) {
  vf sums[4];
  UNROLL
  for (int j = 0; j < 4; j++) sums[j] = vset(0);
  int64_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES) {
    UNROLL
    for (int j = 0; j < 4; j++) sums[j] = f(i + j * LANES, LANES, sums[j]);
  }
  for (; i + LANES <= n; i += LANES) sums[0] = f(i, LANES, sums[0]);
  if (i < n) sums[1] = f(i, (int)(n - i), sums[1]);
  return vsum(vadd(vadd(sums[0], sums[1]), vadd(sums[2], sums[3])));
}

// 1 / sqrt(mean of squares + eps)
static inline float inverse_rms(const float* x, int64_t d, float eps) {
  const float squares = sum_lanes(d, [x](int64_t i, int count, vf sum) {
    const vf v = load_some(x + i, count);
    return vfma(v, v, sum);
  });
  return 1.0f / __builtin_sqrtf(squares / (float)d + eps);
}

static inline void rms_norm_row(const float* x, const float* weight, float* out, int64_t d,
                                float eps) {
  const vf scale = vset(inverse_rms(x, d, eps));
  for_lanes(d, [=](int64_t i, int count) {
    const vf y = vmul(vmul(load_some(x + i, count), scale), load_some(weight + i, count));
    store_some(out + i, y, count);
  });
}

static void rms_norm(const RmsNorm& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++)
    rms_norm_row(a.x + row * a.d, a.weight, a.out + row * a.d, a.d, a.eps);
}

static void add_rms_norm(const AddRmsNorm& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const float* y = a.y + row * a.d;
    const float* stream = a.stream + row * a.d;
    float* sum = a.sum + row * a.d;
    if (a.inner) {
      rms_norm_row(y, a.inner, sum, a.d, a.eps);
      y = sum;
    }
    for_lanes(a.d, [=](int64_t i, int count) {
      store_some(sum + i, vadd(load_some(stream + i, count), load_some(y + i, count)), count);
    });
    rms_norm_row(sum, a.weight, a.out + row * a.d, a.d, a.eps);
  }
}

static void layer_norm(const LayerNorm& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const float* x = a.x + row * a.d;
    float* out = a.out + row * a.d;
    const float mean = sum_lanes(a.d, [x](int64_t i, int count,
                                          vf sum) { return vadd(sum, load_some(x + i, count)); }) /
                       (float)a.d;
    // Centred before squaring: the mean may be much larger than the spread.
    for_lanes(a.d, [=](int64_t i, int count) {
      store_some(out + i, vsub(load_some(x + i, count), vset(mean)), count);
    });
    const vf scale = vset(inverse_rms(out, a.d, a.eps));
    for_lanes(a.d, [&, out](int64_t i, int count) {
      vf y = vmul(vmul(load_some(out + i, count), scale), load_some(a.weight + i, count));
      if (a.bias) y = vadd(y, load_some(a.bias + i, count));
      store_some(out + i, y, count);
    });
  }
}

// x through its activation, as x * sigmoid(z). The exponential is infinite where the result is 0.
template <Gate G>
static inline vf activate(vf x) {
  vf z = x;
  if constexpr (G == Gate::gelu_tanh) {
    // 0.5 * (1 + tanh(y)) = sigmoid(2 * y), with y = sqrt(2 / pi) * (x + 0.044715 * x^3).
    z = vmul(x, vfma(vmul(x, x), vset(0.0713548162726009f), vset(1.5957691216057308f)));
  }
  return vdiv(x, vadd(vset(1), vexp(vsub(vset(0), z))));
}

template <Gate G>
static inline void gated_range(const Gated& a, int64_t begin, int64_t end) {
  for_lanes(end - begin, [&](int64_t i, int count) {
    const vf gate = load_some(a.gate + begin + i, count), up = load_some(a.up + begin + i, count);
    store_some(a.out + begin + i, vmul(activate<G>(gate), up), count);
  });
}

static void gated(const Gated& a, int64_t begin, int64_t end) {
  if (a.kind == Gate::silu) gated_range<Gate::silu>(a, begin, end);
  else gated_range<Gate::gelu_tanh>(a, begin, end);
}

static void soft_cap(const SoftCap& a, int64_t begin, int64_t end) {
  const vf cap = vset(a.cap);
  for_lanes(end - begin, [&, cap](int64_t i, int count) {
    const vf x = load_some(a.x + begin + i, count);
    store_some(a.out + begin + i, vmul(vtanh(vdiv(x, cap)), cap), count);
  });
}

}  // namespace KERNELS
