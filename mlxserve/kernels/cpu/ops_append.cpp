#include <algorithm>
#include <cstring>

#include "bind.h"
#include "cache_arrays.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlxserve {
namespace {

// Sealing fewer numbers than this isn't worth another thread.
constexpr int64_t SMALL_SEAL = 1 << 15;

// One layer's keys or values while new tokens are added.
struct Store {
  char* hot;
  char* pool;  // numbers or codes
  uint16_t *scales, *biases;
  int64_t hot_tokens, pool_pages, heads, dim, item;
  Number type;
  PageFormat format;
  void (*pack)(const PackPage&);  // of a packed pool

  int64_t token_bytes() const { return heads * dim * item; }

  // A head of a hot page to a pool page: token-major to head-major.
  void seal(int64_t from, int64_t to, int64_t head) const {
    if (from < 0 || from >= hot_tokens / PAGE || to < 0 || to >= pool_pages) return;
    const int64_t size = dim * item, at = to * heads + head;
    const char* x = hot + from * PAGE * token_bytes() + head * size;
    if (format.bits) {
      const int64_t group = at * format.groups;
      pack({x, heads * dim, type, static_cast<int>(dim), format.bits,
            reinterpret_cast<uint8_t*>(pool) + at * format.code_bytes(), scales + group,
            biases + group});
      return;
    }
    for (int64_t t = 0; t < PAGE; t++)
      std::memcpy(pool + (at * PAGE + t) * size, x + t * token_bytes(), size);
  }

  // A token outside of the array is not written: its index is somebody's mistake, not somebody's
  // memory.
  void append(int64_t token, int32_t index, const void* x, bool narrow) const {
    if (index < 0 || index >= hot_tokens) return;
    char* to = hot + index * token_bytes();
    const int64_t count = heads * dim;
    if (narrow)
      kernels().to_cache(static_cast<const float*>(x) + token * count,
                         reinterpret_cast<uint16_t*>(to), type, count);
    else std::memcpy(to, static_cast<const char*>(x) + token * token_bytes(), token_bytes());
  }
};

// The pool's arrays, from out[at] on.
void set_pool(Store& store, const Outputs& out, size_t& at) {
  store.pool = static_cast<char*>(out[at++]);
  if (!store.format.bits) return;
  store.scales = static_cast<uint16_t*>(out[at++]);
  store.biases = static_cast<uint16_t*>(out[at++]);
}

// The work of `append`, for a shape: what stays the same from one step to the next.
struct Append {
  Store keys, values;
  int64_t tokens, moves;
  bool narrow;

  void operator()(const Inputs& in, const Outputs& out) const {
    Store stores[2] = {keys, values};
    for (int i = 0; i < 2; i++) stores[i].hot = static_cast<char*>(out[i]);
    size_t at = 2;
    for (int i = 0; moves && i < 2; i++) set_pool(stores[i], out, at);
    stores[0].pack = kernels().pack_keys;
    stores[1].pack = kernels().pack_values;
    // A page that is sealed may be written anew in this very step: all seals come first.
    const int64_t heads = keys.heads;
    const int64_t at_once = std::max<int64_t>(1, SMALL_SEAL / (PAGE * keys.dim));
    parallel_for(2 * moves * heads, at_once, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const auto* move = static_cast<const int32_t*>(in[5]) + i / (2 * heads) * 2;
        stores[i / heads % 2].seal(move[0], move[1], i % heads);
      }
    });
    parallel_for(tokens, 64, [&](int64_t begin, int64_t end) {
      const auto* index = static_cast<const int32_t*>(in[2]);
      for (int64_t t = begin; t < end; t++)
        for (int i = 0; i < 2; i++) stores[i].append(t, index[t], in[3 + i], narrow);
    });
  }
};

// Seals pages (moves [n, 2] int32: hot page, pool page), then puts tokens k, v [T, Hk, D] at flat
// hot positions index [T] int32. Returns hot_k and hot_v, then the arrays of both pools. One op for
// all of it: nothing else holds a buffer of them in between, so they are written where they are.
std::vector<mx::array> append(const mx::array& hot_k, const mx::array& hot_v,
                              const PoolArrays& pool_k, const PoolArrays& pool_v,
                              const mx::array& index, const mx::array& k, const mx::array& v,
                              const std::optional<mx::array>& moves) {
  const char* op = "append";
  const CacheFormat format = check_cache(op, hot_k, hot_v, pool_k, pool_v);
  require_ndim(op, "index", index, 1);
  require_dtype(op, "index", index, mx::int32);
  require_shape(op, "k", k, {index.shape(0), hot_k.shape(1), hot_k.shape(2)});
  require_shape(op, "v", v, k.shape());
  require_dtype(op, "v", v, k.dtype());
  const bool narrow = k.dtype() != hot_k.dtype();
  if (narrow) require_dtype(op, "k", k, mx::float32);
  std::vector<mx::array> inputs = {hot_k, hot_v, index, k, v}, pools = pool_k;
  pools.insert(pools.end(), pool_v.begin(), pool_v.end());
  std::vector<OutputSpec> outputs = {{hot_k.shape(), hot_k.dtype(), 0},
                                     {hot_v.shape(), hot_v.dtype(), 1}};
  int n_moves = 0;
  if (moves) {
    require_dtype(op, "moves", *moves, mx::int32);
    require_ndim(op, "moves", *moves, 2);
    n_moves = moves->shape(0);
    require_shape(op, "moves", *moves, {n_moves, 2});
    inputs.push_back(*moves);
    for (const auto& x : pools) {
      outputs.push_back({x.shape(), x.dtype(), static_cast<int>(inputs.size())});
      inputs.push_back(x);
    }
  }
  Store keys{};
  keys.hot_tokens = hot_k.shape(0), keys.pool_pages = format.pool_pages;
  keys.heads = hot_k.shape(1), keys.dim = hot_k.shape(2);
  keys.item = bytes_of(format.number), keys.type = format.number;
  Store values = keys;
  keys.format = format.keys, values.format = format.values;
  auto made = lazy(op, inputs, outputs, Append{keys, values, index.shape(0), n_moves, narrow});
  if (!moves) made.insert(made.end(), pools.begin(), pools.end());
  return made;
}

}  // namespace

void bind_append(nb::module_& m) {
  m.def("append", &append, "hot_k"_a, "hot_v"_a, "pool_k"_a, "pool_v"_a, "index"_a, "k"_a, "v"_a,
        "moves"_a.none());
}

}  // namespace mlxserve
