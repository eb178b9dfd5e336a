#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlxserve {
namespace {

// key (two words), temperature, top_k, top_p, min_p
using Row = std::tuple<uint32_t, uint32_t, float, int64_t, float, float>;

// Counters of the noise and weights of a row stay in range below this.
constexpr int MAX_VOCAB = 1 << 23;

void check_logits(const char* op, const mx::array& logits) {
  require_ndim(op, "logits", logits, 2);
  require_dtype(op, "logits", logits, mx::float32);
  const int vocab = logits.shape(1);
  if (vocab < 1 || vocab > MAX_VOCAB)
    refuse(op, "logits of " + std::to_string(vocab) + " tokens aren't supported");
}

std::vector<Filter> filters_of(const char* op, const mx::array& logits,
                               const std::vector<Row>& rows) {
  check_logits(op, logits);
  if (static_cast<int>(rows.size()) != logits.shape(0))
    refuse(op, std::to_string(rows.size()) + " filters for " + std::to_string(logits.shape(0)) +
                   " rows of logits");
  std::vector<Filter> filters;
  for (const auto& [k0, k1, temperature, top_k, top_p, min_p] : rows) {
    if (!(temperature > 0) || top_k < 0 || !(top_p > 0) || !(min_p >= 0 && min_p <= 1))
      refuse(op, "temperature or a filter is out of its range");
    filters.push_back({{k0, k1}, temperature, top_k, top_p, min_p});
  }
  return filters;
}

// Rows of logits [B, V] through their filters: the tokens drawn, or the logits that are left.
template <class T>
mx::array select(const char* op, const mx::array& logits, const std::vector<Row>& rows,
                 T* Select::* result, const OutputSpec& output) {
  const auto work = [filters = filters_of(op, logits, rows), vocab = logits.shape(1), result](
                        const Inputs& in, const Outputs& out) {
    Select a{static_cast<const float*>(in[0]), filters.data(), nullptr, nullptr, vocab};
    a.*result = static_cast<T*>(out[0]);
    parallel_for(filters.size(), 1,
                 [&](int64_t begin, int64_t end) { kernels().select(a, begin, end); });
  };
  return lazy(op, {logits}, {output}, work)[0];
}

mx::array draw(const mx::array& logits, const std::vector<Row>& rows) {
  return select("draw", logits, rows, &Select::ids, {{static_cast<int>(rows.size())}, mx::int32});
}

mx::array filtered(const mx::array& logits, const std::vector<Row>& rows) {
  return select("filtered", logits, rows, &Select::filtered, {logits.shape(), mx::float32});
}

// The likeliest token of each row, and whether all of the row's logits are finite.
std::vector<mx::array> greedy(const mx::array& logits) {
  const char* op = "greedy";
  check_logits(op, logits);
  const int rows = logits.shape(0);
  const int64_t vocab = logits.shape(1);
  const auto work = [=](const Inputs& in, const Outputs& out) {
    const Greedy a{static_cast<const float*>(in[0]), static_cast<int32_t*>(out[0]),
                   static_cast<bool*>(out[1]), vocab};
    // A row of a small vocabulary takes a few microseconds.
    parallel_for(rows, std::max<int64_t>((1 << 18) / vocab, 1),
                 [&](int64_t begin, int64_t end) { kernels().greedy(a, begin, end); });
  };
  return lazy(op, {logits}, {{{rows}, mx::int32}, {{rows}, mx::bool_}}, work);
}

// A row's logits; those of tokens whose bit isn't set are -infinity. Grammars allow few tokens or
// nearly all: most words of 32 bits are empty or full.
void allow(const float* logits, const uint32_t* bits, float* out, int64_t vocab) {
  constexpr float NOWHERE = -std::numeric_limits<float>::infinity();
  for (int64_t at = 0; at < vocab; at += 32) {
    const uint32_t word = bits[at / 32];
    const int count = static_cast<int>(std::min<int64_t>(32, vocab - at));
    if (word == 0) {
      std::fill_n(out + at, count, NOWHERE);
    } else if (word == 0xffffffff) {
      std::copy_n(logits + at, count, out + at);
    } else {
      for (int i = 0; i < count; i++) out[at + i] = word >> i & 1 ? logits[at + i] : NOWHERE;
    }
  }
}

mx::array allowed(const mx::array& logits, const mx::array& bits) {
  const char* op = "allowed";
  check_logits(op, logits);
  const int rows = logits.shape(0);
  const int64_t vocab = logits.shape(1), words = (vocab + 31) / 32;
  require_dtype(op, "bits", bits, mx::uint32);
  require_shape(op, "bits", bits, {rows, static_cast<int>(words)});
  const auto work = [=](const Inputs& in, const Outputs& out) {
    const auto* x = static_cast<const float*>(in[0]);
    const auto* allowed = static_cast<const uint32_t*>(in[1]);
    auto* y = static_cast<float*>(out[0]);
    parallel_for(rows, std::max<int64_t>((1 << 16) / vocab, 1), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++)
        allow(x + row * vocab, allowed + row * words, y + row * vocab, vocab);
    });
  };
  return lazy(op, {logits, bits}, {{logits.shape(), mx::float32}}, work)[0];
}

}  // namespace

void bind_select(nb::module_& m) {
  m.def("allowed", &allowed, "logits"_a, "bits"_a);
  m.def("draw", &draw, "logits"_a, "rows"_a);
  m.def("filtered", &filtered, "logits"_a, "rows"_a);
  m.def("greedy", &greedy, "logits"_a);
}

}  // namespace mlxserve
