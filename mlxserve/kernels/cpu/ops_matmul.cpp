#include <algorithm>
#include <cstring>
#include <limits>
#include <map>

#include "bind.h"
#include "packing.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlxserve {
namespace {

// Work below this many multiply-adds isn't worth waking a thread for.
constexpr int64_t SMALL = 1 << 15;
constexpr int64_t ROWS_TOGETHER = 128;

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
  if (scales.dtype() == mx::float32) return Number::f32;
  if (scales.dtype() == mx::float16) return Number::f16;
  if (scales.dtype() == mx::bfloat16) return Number::bf16;
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

// One weight in panels; data: uint8 [panels, bytes of a panel]. Checked when made.
struct PanelWeight {
  mx::array data;
  Panels panels;
};

// weight: as RowMajor says. scales: None for dense weights; biases: None where they aren't stored.
PanelWeight pack(const mx::array& weight, const std::optional<mx::array>& scales,
                 const std::optional<mx::array>& biases, const std::string& codec, int group) {
  const char* op = "pack";
  require_ndim(op, "weight", weight, 2);
  Panels p{nullptr, weight.shape(0), weight.shape(1), codec_of(op, codec), group, Number::f32,
           false};
  if (!p.n || !p.k) refuse(op, "weight is empty: " + text(weight.shape()));
  std::vector<mx::array> inputs = {weight};
  if (is_dense(p.codec)) {
    require_dtype(op, "weight", weight, dense_dtype(p.codec));
    p.group = static_cast<int>(p.k);
  } else {
    require_dtype(op, "weight", weight, mx::uint32);
    p.k = p.k * 32 / bits_of(p.codec);
    check_group(op, p);
    if (!scales) refuse(op, "a quantised weight needs scales");
    const mx::Shape expected{weight.shape(0), static_cast<int>(p.k / group)};
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
  const mx::Shape shape{static_cast<int>(p.panels()), static_cast<int>(p.panel_bytes())};
  auto data = lazy(op, inputs, {{shape, mx::uint8}}, [p](const Inputs& in, const Outputs& out) {
    const auto at = [&](size_t i) {
      return i < in.size() ? static_cast<const uint8_t*>(in[i]) : nullptr;
    };
    const RowMajor from{at(0), at(1), at(2)};
    parallel_for(p.panels(), 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        pack_panel(p, from, i, static_cast<uint8_t*>(out[0]) + i * p.panel_bytes());
    });
  })[0];
  return {data, p};
}

// x in whole numbers, for each size of group that the weights have. The memory is the stream
// thread's own and kept: as large as the largest step needs.
class WholeX {
 public:
  void prepare(std::vector<Matmul>& jobs) {
    size_t bytes = 0;
    for (size_t i = 0; i < jobs.size(); i++)
      if (first_of(jobs, i) == i) bytes += bytes_for(jobs[i]);
    if (memory_.size() < bytes) memory_.resize(bytes);
    char* at = memory_.data();
    for (size_t i = 0; i < jobs.size(); i++) {
      if (!is_whole(jobs[i].w.codec)) continue;
      const size_t first = first_of(jobs, i);
      if (first == i) at = convert(jobs[i], at);
      else jobs[i].whole = jobs[first].whole;
    }
  }

 private:
  // The first job that has the same groups.
  static size_t first_of(const std::vector<Matmul>& jobs, size_t i) {
    for (size_t j = 0; j < i; j++)
      if (is_whole(jobs[j].w.codec) && jobs[j].w.group == jobs[i].w.group) return j;
    return i;
  }

  static size_t bytes_for(const Matmul& job) {
    return is_whole(job.w.codec) ? job.m * job.w.k * 2 + job.m * job.w.k / job.w.group * 12 : 0;
  }

  static char* convert(Matmul& job, char* at) {
    const int64_t values = job.m * job.w.k, groups = values / job.w.group;
    job.whole.scales = reinterpret_cast<float*>(at);
    job.whole.sums = reinterpret_cast<int32_t*>(at + groups * 4);
    job.whole.totals = reinterpret_cast<float*>(at + groups * 8);
    job.whole.q = reinterpret_cast<int16_t*>(at + groups * 12);
    parallel_for(job.m, std::max<int64_t>(1, SMALL / job.w.k), [&job](int64_t begin, int64_t end) {
      kernels().to_whole(job.x, job.w.k, job.w.group, job.whole, begin, end);
    });
    return at + bytes_for(job);
  }

  std::vector<char> memory_;
};

// All panels of all weights, as one list of items for the threads: (a few panels, a block of rows).
void run(std::vector<Matmul>& jobs) {
  const int64_t rows = jobs[0].m, blocks = (rows + ROWS_TOGETHER - 1) / ROWS_TOGETHER;
  if (!rows) return;
  static thread_local WholeX whole;
  whole.prepare(jobs);
  int64_t panels = 0, work = 0;
  for (const auto& job : jobs) {
    panels += job.w.panels();
    work += job.w.n * job.w.k * rows;
  }
  // Four panels at a time is what one row runs best with.
  const int64_t share = panels / (threads() * 4) / 4 * 4;
  const int64_t grain = work < SMALL ? panels : rows == 1 ? std::max<int64_t>(share, 4) : 1;
  parallel_for((panels + grain - 1) / grain * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; item++) {
      const int64_t row = item % blocks * ROWS_TOGETHER,
                    row_end = std::min(rows, row + ROWS_TOGETHER);
      int64_t first = item / blocks * grain, last = std::min(panels, first + grain);
      for (const auto& job : jobs) {
        const int64_t count = job.w.panels(), stop = std::min(last, count);
        if (first < stop) kernels().matmul(job, first, stop, row, row_end);
        first = std::max<int64_t>(first - count, 0);
        last -= count;
        if (last <= 0) break;
      }
    }
  });
}

// x [T, K] float32 -> for each weight [T, N], + its bias, + add (only with one weight).
std::vector<mx::array> matmul(const mx::array& x, const std::vector<const PanelWeight*>& weights,
                              const std::vector<std::optional<mx::array>>& biases,
                              const std::optional<mx::array>& add) {
  const char* op = "matmul";
  require_ndim(op, "x", x, 2);
  require_dtype(op, "x", x, mx::float32);
  if (weights.empty() || biases.size() != weights.size())
    refuse(op, "needs weights, and a bias or None for each");
  if (add && weights.size() != 1) refuse(op, "`add` goes with a single weight");
  const int rows = x.shape(0);
  std::vector<mx::array> inputs = {x};
  std::vector<OutputSpec> outputs;
  std::vector<Matmul> jobs;
  for (const PanelWeight* w : weights) {
    if (!w) refuse(op, "a weight is None");
    const Panels& p = w->panels;
    if (p.k != x.shape(1))
      refuse(op,
             "x has K=" + std::to_string(x.shape(1)) + ", the weight has K=" + std::to_string(p.k));
    jobs.push_back({nullptr, {}, p, nullptr, nullptr, nullptr, rows});
    inputs.push_back(w->data);
    outputs.push_back({{rows, static_cast<int>(p.n)}, mx::float32});
  }
  std::vector<size_t> bias_at(weights.size(), 0);
  for (size_t i = 0; i < weights.size(); i++) {
    if (!biases[i]) continue;
    require_dtype(op, "bias", *biases[i], mx::float32);
    require_shape(op, "bias", *biases[i], {static_cast<int>(jobs[i].w.n)});
    bias_at[i] = inputs.size();
    inputs.push_back(*biases[i]);
  }
  if (add) {
    require_dtype(op, "add", *add, mx::float32);
    require_shape(op, "add", *add, outputs[0].shape);
    inputs.push_back(*add);
  }
  const bool adds = add.has_value();
  return lazy(op, inputs, outputs, [jobs, bias_at, adds](const Inputs& in, const Outputs& out) {
    std::vector<Matmul> ready = jobs;
    const auto floats = [&](size_t i) { return static_cast<const float*>(in[i]); };
    for (size_t i = 0; i < ready.size(); i++) {
      ready[i].x = floats(0);
      ready[i].w.data = static_cast<const uint8_t*>(in[1 + i]);
      ready[i].bias = bias_at[i] ? floats(bias_at[i]) : nullptr;
      ready[i].add = adds ? floats(in.size() - 1) : nullptr;
      ready[i].out = static_cast<float*>(out[i]);
    }
    run(ready);
  });
}

// Rows ids [T] int32 of a weight, times scale, as float32 [T, K]; an id outside it gives a row of
// NaN.
mx::array rows(const PanelWeight& weight, const mx::array& ids, float scale) {
  const char* op = "rows";
  require_ndim(op, "ids", ids, 1);
  require_dtype(op, "ids", ids, mx::int32);
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
  m.def("matmul", &matmul, "x"_a, "weights"_a, "biases"_a, "add"_a.none());
  m.def("rows", &rows, "weight"_a, "ids"_a, "scale"_a = 1.0f);
}

}  // namespace mlxserve
