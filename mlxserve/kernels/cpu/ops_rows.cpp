#include <algorithm>

#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlxserve {
namespace {

using Array = mx::array;
using MaybeArray = std::optional<mx::array>;

// So many numbers take a thread 10 to 30 microseconds: less isn't worth waking one for.
constexpr int64_t SHARE = 1 << 15;

// work(begin, end) over rows of `width` numbers.
template <class F>
void over_rows(int64_t rows, int64_t width, const F& work) {
  if (rows * width < 2 * SHARE) return work(0, rows);
  parallel_for(rows, std::max<int64_t>(SHARE / width, 1), work);
}

// work(begin, end) over numbers, whole vectors but for the last.
template <class F>
void over_numbers(int64_t size, const F& work) {
  constexpr int64_t block = 256;
  over_rows((size + block - 1) / block, block,
            [&](int64_t begin, int64_t end) { work(begin * block, std::min(end * block, size)); });
}

const float* floats(const void* p) {
  return static_cast<const float*>(p);
}
float* floats(void* p) {
  return static_cast<float*>(p);
}

void require_floats(const char* op, const char* argument, const Array& a, const mx::Shape& shape) {
  require_dtype(op, argument, a, mx::float32);
  require_shape(op, argument, a, shape);
}

// Width of x [..., D], which has at least one dimension.
int last_axis(const char* op, const Array& x) {
  require_dtype(op, "x", x, mx::float32);
  if (x.ndim() == 0) refuse(op, "x has shape [], expected at least 1 dimension");
  return x.shape(-1);
}

int64_t rows_of(const Array& x, int d) {
  return d ? static_cast<int64_t>(x.size()) / d : 0;
}

Array rms_norm(const Array& x, const Array& weight, float eps) {
  const char* op = "rms_norm";
  const int d = last_axis(op, x);
  require_floats(op, "weight", weight, {d});
  const int64_t rows = rows_of(x, d);
  const auto work = [=](const Inputs& in, const Outputs& out) {
    const RmsNorm a{floats(in[0]), floats(in[1]), floats(out[0]), d, eps};
    over_rows(rows, d, [&](int64_t begin, int64_t end) { kernels().rms_norm(a, begin, end); });
  };
  return lazy(op, {x, weight}, {{x.shape(), mx::float32}}, work)[0];
}

// The sum, and its norm.
std::vector<Array> add_rms_norm(const Array& y, const Array& stream, const Array& weight, float eps,
                                const MaybeArray& inner) {
  const char* op = "add_rms_norm";
  const int d = last_axis(op, y);
  require_floats(op, "stream", stream, y.shape());
  require_floats(op, "weight", weight, {d});
  std::vector<Array> inputs = {y, stream, weight};
  if (inner) {
    require_floats(op, "inner", *inner, {d});
    inputs.push_back(*inner);
  }
  const int64_t rows = rows_of(y, d);
  const auto work = [=](const Inputs& in, const Outputs& out) {
    const float* inner = in.size() > 3 ? floats(in[3]) : nullptr;
    const AddRmsNorm a{
        floats(in[0]), floats(in[1]), floats(in[2]), inner, floats(out[0]), floats(out[1]), d, eps};
    over_rows(rows, d, [&](int64_t begin, int64_t end) { kernels().add_rms_norm(a, begin, end); });
  };
  const OutputSpec spec{y.shape(), mx::float32};
  return lazy(op, inputs, {spec, spec}, work);
}

Array layer_norm(const Array& x, const Array& weight, const MaybeArray& bias, float eps) {
  const char* op = "layer_norm";
  const int d = last_axis(op, x);
  require_floats(op, "weight", weight, {d});
  std::vector<Array> inputs = {x, weight};
  if (bias) {
    require_floats(op, "bias", *bias, {d});
    inputs.push_back(*bias);
  }
  const int64_t rows = rows_of(x, d);
  const auto work = [=](const Inputs& in, const Outputs& out) {
    const float* bias = in.size() > 2 ? floats(in[2]) : nullptr;
    const LayerNorm a{floats(in[0]), floats(in[1]), bias, floats(out[0]), d, eps};
    over_rows(rows, d, [&](int64_t begin, int64_t end) { kernels().layer_norm(a, begin, end); });
  };
  return lazy(op, inputs, {{x.shape(), mx::float32}}, work)[0];
}

Array gated(const Array& gate, const Array& up, const std::string& kind) {
  const char* op = "gated";
  require_dtype(op, "gate", gate, mx::float32);
  require_floats(op, "up", up, gate.shape());
  if (kind != "silu" && kind != "gelu_pytorch_tanh") refuse(op, "unknown activation " + kind);
  const Gate which = kind == "silu" ? Gate::silu : Gate::gelu_tanh;
  const int64_t size = gate.size();
  const auto work = [=](const Inputs& in, const Outputs& out) {
    const Gated a{floats(in[0]), floats(in[1]), floats(out[0]), which};
    over_numbers(size, [&](int64_t begin, int64_t end) { kernels().gated(a, begin, end); });
  };
  return lazy(op, {gate, up}, {{gate.shape(), mx::float32}}, work)[0];
}

Array soft_cap(const Array& x, float cap) {
  const char* op = "soft_cap";
  require_dtype(op, "x", x, mx::float32);
  const int64_t size = x.size();
  const auto work = [=](const Inputs& in, const Outputs& out) {
    const SoftCap a{floats(in[0]), floats(out[0]), cap};
    over_numbers(size, [&](int64_t begin, int64_t end) { kernels().soft_cap(a, begin, end); });
  };
  return lazy(op, {x}, {{x.shape(), mx::float32}}, work)[0];
}

// Where an optional input stands among all, or -1.
int add_input(std::vector<Array>& inputs, const MaybeArray& a) {
  if (!a) return -1;
  inputs.push_back(*a);
  return static_cast<int>(inputs.size()) - 1;
}

std::vector<Array> rope(const Array& q, const Array& k, const Array& positions,
                        const Array& periods, float gain, const MaybeArray& q_norm,
                        const MaybeArray& k_norm, float eps) {
  const char* op = "rope";
  require_ndim(op, "q", q, 3);
  require_ndim(op, "k", k, 3);
  require_dtype(op, "q", q, mx::float32);
  const int tokens = q.shape(0), dim = q.shape(2);
  require_floats(op, "k", k, {tokens, k.shape(1), dim});
  require_dtype(op, "positions", positions, mx::int32);
  require_shape(op, "positions", positions, {tokens});
  if (dim % 2 || dim > MAX_ROPE_DIM)
    refuse(op, "D=" + std::to_string(dim) + " isn't an even number up to " +
                   std::to_string(MAX_ROPE_DIM));
  require_floats(op, "periods", periods, {dim / 2});
  if (q_norm) require_floats(op, "q_norm", *q_norm, {dim});
  if (k_norm) require_floats(op, "k_norm", *k_norm, {dim});
  std::vector<Array> inputs = {q, k, positions, periods};
  const int q_norm_at = add_input(inputs, q_norm), k_norm_at = add_input(inputs, k_norm);
  Rope job{};
  job.q_heads = q.shape(1);
  job.k_heads = k.shape(1);
  job.dim = dim;
  job.gain = gain;
  job.eps = eps;
  const auto work = [=](const Inputs& in, const Outputs& out) {
    Rope a = job;
    a.q = floats(in[0]);
    a.k = floats(in[1]);
    a.positions = static_cast<const int32_t*>(in[2]);
    a.periods = floats(in[3]);
    a.q_norm = q_norm_at < 0 ? nullptr : floats(in[q_norm_at]);
    a.k_norm = k_norm_at < 0 ? nullptr : floats(in[k_norm_at]);
    a.q_out = floats(out[0]);
    a.k_out = floats(out[1]);
    const int64_t width = std::max<int64_t>((a.q_heads + a.k_heads) * a.dim, 1);
    over_rows(tokens, width, [&](int64_t begin, int64_t end) { kernels().rope(a, begin, end); });
  };
  return lazy(op, inputs, {{q.shape(), mx::float32}, {k.shape(), mx::float32}}, work);
}

}  // namespace

void bind_rows(nb::module_& m) {
  m.def("rms_norm", &rms_norm, "x"_a, "weight"_a, "eps"_a);
  m.def("add_rms_norm", &add_rms_norm, "y"_a, "stream"_a, "weight"_a, "eps"_a, "inner"_a.none());
  m.def("layer_norm", &layer_norm, "x"_a, "weight"_a, "bias"_a.none(), "eps"_a);
  m.def("gated", &gated, "gate"_a, "up"_a, "kind"_a);
  m.def("soft_cap", &soft_cap, "x"_a, "cap"_a);
  m.def("rope", &rope, "q"_a, "k"_a, "positions"_a, "periods"_a, "gain"_a, "q_norm"_a.none(),
        "k_norm"_a.none(), "eps"_a);
}

}  // namespace mlxserve
