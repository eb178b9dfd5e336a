#include <algorithm>

#include "bind.h"
#include "mlx/allocator.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlxserve {
namespace {

Number number_of(const char* op, const mx::array& w) {
  if (const auto number = as_number(w.dtype())) return *number;
  refuse(op, "w is " + text(w.dtype()) + ", expected a floating type");
}

// Weights that are taken together; their sums of squares are a row of `errors`.
constexpr int TILE = 1 << 16;

int tiles_of(int n, int k) {
  return static_cast<int>((static_cast<int64_t>(n) * k + TILE - 1) / TILE);
}

// Calls quantise(part, begin, end) for the groups of each tile. a: errors [tiles, 2].
template <class A>
void by_tiles(A a, int n, int k, void (*quantise)(const A&, int64_t, int64_t)) {
  const int64_t groups = static_cast<int64_t>(n) * (k / a.group), step = TILE / a.group;
  for (int64_t begin = 0; begin < groups; begin += step, a.errors += 2)
    quantise(a, begin, std::min(groups, begin + step));
}

// work(w, outputs), now and on this thread: whoever converts a model has a thread for each core, and
// a piece stays in that core's cache. Other Python threads run meanwhile.
template <class W>
std::vector<mx::array> at_once(mx::array w, const std::vector<OutputSpec>& outputs, W work) {
  const nb::gil_scoped_release release;
  w.eval();
  if (!w.flags().row_contiguous) {
    w = mx::contiguous(w);
    w.eval();
  }
  std::vector<mx::array> made;
  Outputs data;
  for (const auto& o : outputs) {
    size_t bytes = mx::size_of(o.dtype);
    for (const auto extent : o.shape) bytes *= extent;
    made.emplace_back(mx::allocator::malloc(bytes), o.shape, o.dtype);
    data.push_back(made.back().data<void>());
  }
  work(w.data<void>(), data);
  return made;
}

// w [N, K] -> weight uint32 [N, K * bits / 32], scales and biases [N, K / group] in w's type, errors
// float32 [tiles, 2]: sums of squares of the rounding and of w.
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
  const auto work = [=](const void* in, const Outputs& out) {
    auto* words = static_cast<uint8_t*>(out[0]);
    auto* errors = static_cast<float*>(out[3]);
    const Quantize a{in, number, words, out[1], out[2], errors, bits, group};
    by_tiles(a, n, k, kernels().quantize);
  };
  const OutputSpec packed{{n, static_cast<int>(static_cast<int64_t>(k) * bits / 32)}, mx::uint32};
  const OutputSpec per_group{{n, k / group}, w.dtype()}, errors{{tiles_of(n, k), 2}, mx::float32};
  return at_once(w, {packed, per_group, per_group, errors}, work);
}

// w [N, K] -> weight uint32 [N, K * bits / 32], scales uint8 [N, K / group]: E8M0 for groups of 32,
// E4M3 for those of 16; errors as above.
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
  const auto work = [=](const void* in, const Outputs& out) {
    auto* codes = static_cast<uint8_t*>(out[0]);
    auto* scales = static_cast<uint8_t*>(out[1]);
    auto* errors = static_cast<float*>(out[2]);
    const QuantizeFloats a{in, number, codes, scales, errors, bits, group};
    by_tiles(a, n, k, kernels().quantize_floats);
  };
  const OutputSpec packed{{n, static_cast<int>(static_cast<int64_t>(k) * bits / 32)}, mx::uint32};
  const OutputSpec scales{{n, k / group}, mx::uint8}, errors{{tiles_of(n, k), 2}, mx::float32};
  return at_once(w, {packed, scales, errors}, work);
}

}  // namespace

void bind_quantize(nb::module_& m) {
  m.def("quantize", &quantize, "w"_a, "bits"_a, "group"_a);
  m.def("quantize_floats", &quantize_floats, "w"_a, "bits"_a, "group"_a);
}

}  // namespace mlxserve
