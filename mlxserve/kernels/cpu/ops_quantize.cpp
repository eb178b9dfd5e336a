#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlxserve {
namespace {

Number number_of(const char* op, const mx::array& w) {
  if (const auto number = as_number(w.dtype())) return *number;
  refuse(op, "w is " + text(w.dtype()) + ", expected a floating type");
}

// w [N, K] -> weight uint32 [N, K * bits / 32], scales and biases [N, K / group] in w's type.
std::vector<mx::array> quantize(const mx::array& w, int bits, int group) {
  const char* op = "quantize";
  require_ndim(op, "w", w, 2);
  const Number number = number_of(op, w);
  if (bits < 2 || bits > 8 || bits == 7)
    refuse(op, std::to_string(bits) + " bits aren't supported; 2, 3, 4, 5, 6 and 8 are");
  if (group != 32 && group != 64 && group != 128)
    refuse(op, "groups of " + std::to_string(group) + " aren't supported; 32, 64 and 128 are");
  const int n = w.shape(0), k = w.shape(1);
  if (k % group)
    refuse(op,
           "K=" + std::to_string(k) + " isn't a multiple of the group " + std::to_string(group));
  const auto work = [=](const Inputs& in, const Outputs& out) {
    const Quantize a{in[0], number, static_cast<uint8_t*>(out[0]), out[1], out[2], bits, group};
    const int64_t groups = static_cast<int64_t>(n) * (k / group);
    parallel_for(groups, (1 << 16) / group,
                 [&](int64_t begin, int64_t end) { kernels().quantize(a, begin, end); });
  };
  const OutputSpec packed{{n, static_cast<int>(static_cast<int64_t>(k) * bits / 32)}, mx::uint32};
  const OutputSpec per_group{{n, k / group}, w.dtype()};
  return lazy(op, {w}, {packed, per_group, per_group}, work);
}

// w [N, K] -> weight uint32 [N, K * bits / 32], scales uint8 [N, K / group]: E8M0 for groups of 32,
// E4M3 for those of 16.
std::vector<mx::array> quantize_floats(const mx::array& w, int bits, int group) {
  const char* op = "quantize_floats";
  require_ndim(op, "w", w, 2);
  const Number number = number_of(op, w);
  if (!((bits == 4 && (group == 16 || group == 32)) || (bits == 8 && group == 32)))
    refuse(op, std::to_string(bits) + " bits in groups of " + std::to_string(group) +
                   " aren't supported; 4 in 32 or 16 and 8 in 32 are");
  const int n = w.shape(0), k = w.shape(1);
  if (k % group)
    refuse(op,
           "K=" + std::to_string(k) + " isn't a multiple of the group " + std::to_string(group));
  const auto work = [=](const Inputs& in, const Outputs& out) {
    auto* codes = static_cast<uint8_t*>(out[0]);
    auto* scales = static_cast<uint8_t*>(out[1]);
    const QuantizeFloats a{in[0], number, codes, scales, bits, group};
    const int64_t groups = static_cast<int64_t>(n) * (k / group);
    parallel_for(groups, (1 << 16) / group,
                 [&](int64_t begin, int64_t end) { kernels().quantize_floats(a, begin, end); });
  };
  const OutputSpec packed{{n, static_cast<int>(static_cast<int64_t>(k) * bits / 32)}, mx::uint32};
  return lazy(op, {w}, {packed, {{n, k / group}, mx::uint8}}, work);
}

}  // namespace

void bind_quantize(nb::module_& m) {
  m.def("quantize", &quantize, "w"_a, "bits"_a, "group"_a);
  m.def("quantize_floats", &quantize_floats, "w"_a, "bits"_a, "group"_a);
}

}  // namespace mlxserve
