#include <algorithm>
#include <limits>
#include <map>

#include "bind.h"
#include "packing.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlxserve {
namespace {

const std::map<std::string, Codec> CODECS = {
    {"f32", Codec::f32}, {"f16", Codec::f16},     {"bf16", Codec::bf16},   {"q2", Codec::q2},
    {"q3", Codec::q3},   {"q4", Codec::q4},       {"q5", Codec::q5},       {"q6", Codec::q6},
    {"q8", Codec::q8},   {"mxfp4", Codec::mxfp4}, {"nvfp4", Codec::nvfp4}, {"mxfp8", Codec::mxfp8}};

Codec codec_of(const char* op, const std::string& name) {
  const auto found = CODECS.find(name);
  if (found == CODECS.end()) refuse(op, "unknown format " + name);
  return found->second;
}

mx::Dtype dense_dtype(Codec codec) {
  return codec == Codec::f32 ? mx::float32 : codec == Codec::f16 ? mx::float16 : mx::bfloat16;
}

Number number_of(const char* op, Codec codec, const mx::array& scales) {
  if (!is_affine(codec)) {
    require_dtype(op, "scales", scales, mx::uint8);
    return codec == Codec::nvfp4 ? Number::e4m3 : Number::e8m0;
  }
  if (const auto number = as_number(scales.dtype())) return *number;
  refuse(op, "scales are " + text(scales.dtype()) + ", expected a floating type");
}

// Groups of 16 for nvfp4; of 32, 64 or 128 for the others: the kernels' blocks and int32 sums.
void check_group(const char* op, const Panels& p) {
  const int g = p.group;
  const bool fits =
      p.codec == Codec::nvfp4 ? g == 16 : g == 32 || (is_affine(p.codec) && (g == 64 || g == 128));
  if (!fits) refuse(op, "groups of " + std::to_string(g) + " aren't supported for this format");
  if (p.k % g)
    refuse(op, "K=" + std::to_string(p.k) + " isn't a multiple of the group " + std::to_string(g));
}

void require_2_or_3_dimensions(const char* op, const char* argument, const mx::array& a) {
  if (a.ndim() != 2 && a.ndim() != 3)
    refuse(op, std::string(argument) + " has shape " + text(a.shape()) +
                   ", expected 2 or 3 dimensions");
}

// A weight in panels, or a stack of weights one after the other, each in panels of its own. data:
// uint8 [panels, bytes of a panel]. Checked when made.
struct PanelWeight {
  mx::array data;
  Panels panels;  // of one matrix
  int experts;    // matrices in the stack; 0: it is no stack
};

// weight: as RowMajor says, or a stack [E, N, K] of these. scales: None for dense weights; biases:
// None where they aren't stored.
PanelWeight pack(const mx::array& weight, const std::optional<mx::array>& scales,
                 const std::optional<mx::array>& biases, const std::string& codec, int group) {
  const char* op = "pack";
  require_2_or_3_dimensions(op, "weight", weight);
  if (!weight.size()) refuse(op, "weight is empty: " + text(weight.shape()));
  const int experts = weight.ndim() == 3 ? weight.shape(0) : 0;
  Panels p{nullptr, weight.shape(-2), weight.shape(-1), codec_of(op, codec), group, Number::f32,
           false};
  std::vector<mx::array> inputs = {weight};
  if (is_dense(p.codec)) {
    require_dtype(op, "weight", weight, dense_dtype(p.codec));
    p.group = static_cast<int>(p.k);
  } else {
    require_dtype(op, "weight", weight, mx::uint32);
    p.k = p.k * 32 / bits_of(p.codec);
    check_group(op, p);
    if (!scales) refuse(op, "a quantised weight needs scales");
    mx::Shape expected = weight.shape();
    expected.back() = static_cast<int>(p.k / group);
    p.scales = number_of(op, p.codec, *scales);
    require_shape(op, "scales", *scales, expected);
    inputs.push_back(*scales);
    if (biases) {
      if (!is_affine(p.codec)) refuse(op, "biases don't go with " + codec);
      require_dtype(op, "biases", *biases, scales->dtype());
      require_shape(op, "biases", *biases, expected);
      inputs.push_back(*biases);
      p.biases = true;
    }
  }
  if (p.panel_bytes() > std::numeric_limits<int>::max())
    refuse(op, "K=" + std::to_string(p.k) + " is too large");
  const int64_t matrices = std::max(experts, 1), panels = matrices * p.panels();
  if (panels > std::numeric_limits<int>::max())
    refuse(op, text(weight.shape()) + " has too many rows");
  std::vector<size_t> matrix_bytes;  // of each input
  for (const auto& input : inputs) matrix_bytes.push_back(input.nbytes() / matrices);
  const mx::Shape shape{static_cast<int>(panels), static_cast<int>(p.panel_bytes())};
  const auto work = [=](const Inputs& in, const Outputs& out) {
    const auto at = [&](size_t i, int64_t matrix) {
      if (i >= in.size()) return static_cast<const uint8_t*>(nullptr);
      return static_cast<const uint8_t*>(in[i]) + matrix * matrix_bytes[i];
    };
    parallel_for(panels, 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const int64_t matrix = i / p.panels();
        const RowMajor from{at(0, matrix), at(1, matrix), at(2, matrix)};
        pack_panel(p, from, i % p.panels(), static_cast<uint8_t*>(out[0]) + i * p.panel_bytes());
      }
    });
  };
  return {lazy(op, inputs, {{shape, mx::uint8}}, work)[0], p, experts};
}

size_t add_input(std::vector<mx::array>& inputs, const mx::array& a) {
  inputs.push_back(a);
  return inputs.size() - 1;
}

// One x against several weights: all that is known before it runs.
class Product {
 public:
  // x float32 [..., K], in `rows` rows of the results. weights, biases: stacks [E, N, K] and
  // [E, N], or single [N, K] and [N]. inputs: x is the first; weights and biases are added.
  Product(const char* op, std::vector<mx::array>& inputs, int64_t rows,
          const std::vector<const PanelWeight*>& weights,
          const std::vector<std::optional<mx::array>>& biases, bool stacked)
      : bias_at_(weights.size(), 0) {
    if (weights.empty() || biases.size() != weights.size())
      refuse(op, "needs weights, and a bias or None for each");
    const int64_t k = inputs[0].shape(-1);
    require_dtype(op, "x", inputs[0], mx::float32);
    for (size_t i = 0; i < weights.size(); i++) {
      if (!weights[i]) refuse(op, "a weight is None");
      const auto& [data, panels, experts] = *weights[i];
      if (stacked != (experts > 0))
        refuse(op, stacked ? "a weight is a single matrix, expected a stack of them"
                           : "a weight is a stack of matrices, expected a single one");
      if (experts != weights[0]->experts)
        refuse(op, "a weight has E=" + std::to_string(experts) +
                       ", another has E=" + std::to_string(weights[0]->experts));
      if (panels.k != k)
        refuse(op,
               "x has K=" + std::to_string(k) + ", the weight has K=" + std::to_string(panels.k));
      jobs_.push_back({nullptr, {}, panels, nullptr, nullptr, rows, nullptr});
      weight_at_.push_back(add_input(inputs, data));
      if (!biases[i]) continue;
      const int n = static_cast<int>(panels.n);
      require_dtype(op, "bias", *biases[i], mx::float32);
      require_shape(op, "bias", *biases[i], stacked ? mx::Shape{experts, n} : mx::Shape{n});
      bias_at_[i] = add_input(inputs, *biases[i]);
    }
  }

  // A result per weight: [..., N].
  std::vector<OutputSpec> outputs(const mx::Shape& leading) const {
    std::vector<OutputSpec> specs;
    for (const auto& job : jobs_) {
      specs.push_back({leading, mx::float32});
      specs.back().shape.push_back(static_cast<int>(job.w.n));
    }
    return specs;
  }

  // The matmuls, with everything in its place.
  std::vector<Matmul> jobs(const Inputs& in, const Outputs& out) const {
    std::vector<Matmul> ready = jobs_;
    for (size_t i = 0; i < ready.size(); i++) {
      ready[i].x = static_cast<const float*>(in[0]);
      ready[i].w.data = static_cast<const uint8_t*>(in[weight_at_[i]]);
      ready[i].bias = bias_at_[i] ? static_cast<const float*>(in[bias_at_[i]]) : nullptr;
      ready[i].out = static_cast<float*>(out[i]);
    }
    return ready;
  }

 private:
  std::vector<Matmul> jobs_;
  std::vector<size_t> weight_at_, bias_at_;  // which input; bias: 0 where there is none
};

// x [T, K] float32 -> for each weight [T, N], + its bias.
std::vector<mx::array> matmul(const mx::array& x, const std::vector<const PanelWeight*>& weights,
                              const std::vector<std::optional<mx::array>>& biases) {
  const char* op = "matmul";
  require_ndim(op, "x", x, 2);
  std::vector<mx::array> inputs = {x};
  const Product product(op, inputs, x.shape(0), weights, biases, false);
  const auto work = [product](const Inputs& in, const Outputs& out) {
    const auto jobs = product.jobs(in, out);
    run_matmul(jobs.data(), static_cast<int>(jobs.size()));
  };
  return lazy(op, inputs, product.outputs({x.shape(0)}), work);
}

// x [T, K] or [T, A, K] float32, experts [T, A] int32 -> for each stack of weights [T, A, N]: the
// row of x times the expert's matrix, + its row of bias [E, N]; NaN where there is no such expert.
std::vector<mx::array> gathered_matmul(const mx::array& x,
                                       const std::vector<const PanelWeight*>& weights,
                                       const mx::array& experts,
                                       const std::vector<std::optional<mx::array>>& biases) {
  const char* op = "gathered_matmul";
  require_ndim(op, "experts", experts, 2);
  require_dtype(op, "experts", experts, mx::int32);
  const int tokens = experts.shape(0), chosen = experts.shape(1);
  require_2_or_3_dimensions(op, "x", x);
  const int k = x.shape(-1);
  require_shape(op, "x", x, x.ndim() == 2 ? mx::Shape{tokens, k} : mx::Shape{tokens, chosen, k});
  const int64_t rows = static_cast<int64_t>(tokens) * chosen;
  if (rows > std::numeric_limits<int>::max())
    refuse(op, "experts is " + text(experts.shape()) + ": too many");
  std::vector<mx::array> inputs = {x, experts};
  const Product product(op, inputs, rows, weights, biases, true);
  const int stack = weights[0]->experts, rows_per_x = x.ndim() == 2 ? chosen : 1;
  const auto work = [=](const Inputs& in, const Outputs& out) {
    const auto jobs = product.jobs(in, out);
    const Choices choices{static_cast<const int32_t*>(in[1]), rows, stack, rows_per_x};
    run_gathered_matmul(jobs.data(), static_cast<int>(jobs.size()), choices);
  };
  return lazy(op, inputs, product.outputs({tokens, chosen}), work);
}

// Rows ids [T] int32 of a weight, times scale, as float32 [T, K]; an id outside it gives a row of
// NaN.
mx::array rows(const PanelWeight& weight, const mx::array& ids, float scale) {
  const char* op = "rows";
  require_ndim(op, "ids", ids, 1);
  require_dtype(op, "ids", ids, mx::int32);
  if (weight.experts) refuse(op, "the weight is a stack of matrices, expected a single one");
  const Panels p = weight.panels;
  const int count = ids.shape(0);
  const mx::Shape shape{count, static_cast<int>(p.k)};
  return lazy(op, {weight.data, ids}, {{shape, mx::float32}},
              [p, count, scale](const Inputs& in, const Outputs& out) {
                Panels w = p;
                w.data = static_cast<const uint8_t*>(in[0]);
                const auto* id = static_cast<const int32_t*>(in[1]);
                auto* values = static_cast<float*>(out[0]);
                parallel_for(count, 4, [&](int64_t begin, int64_t end) {
                  for (int64_t i = begin; i < end; i++) {
                    if (id[i] >= 0 && id[i] < w.n) unpack_row(w, id[i], values + i * w.k);
                    else std::fill_n(values + i * w.k, w.k, __builtin_nanf(""));
                    if (scale != 1)
                      for (int64_t k = i * w.k; k < (i + 1) * w.k; k++) values[k] *= scale;
                  }
                });
              })[0];
}

}  // namespace

void bind_matmul(nb::module_& m) {
  nb::class_<PanelWeight>(m, "PanelWeight").def_ro("data", &PanelWeight::data);
  m.def("pack", &pack, "weight"_a, "scales"_a.none(), "biases"_a.none(), "codec"_a, "group"_a);
  m.def("matmul", &matmul, "x"_a, "weights"_a, "biases"_a);
  m.def("gathered_matmul", &gathered_matmul, "x"_a, "weights"_a, "experts"_a, "biases"_a);
  m.def("rows", &rows, "weight"_a, "ids"_a, "scale"_a = 1.0f);
}

}  // namespace mlxserve
