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
  int64_t hot_pages, pool_pages, page_tokens, heads, dim, item;
  Number type;
  PageFormat format;
  void (*pack)(const PackPage&);  // of a packed pool

  int64_t token_bytes() const { return heads * dim * item; }

  // A head of a hot page to a pool page: token-major to head-major.
  void seal(int64_t from, int64_t to, int64_t head) const {
    if (from < 0 || from >= hot_pages || to < 0 || to >= pool_pages) return;
    const int64_t size = dim * item, at = to * heads + head;
    const char* x = hot + from * page_tokens * token_bytes() + head * size;
    if (format.bits) {
      const int64_t group = at * format.groups;
      pack({x, heads * dim, type, static_cast<int>(page_tokens), static_cast<int>(dim), format.bits,
            reinterpret_cast<uint8_t*>(pool) + at * format.code_bytes(), scales + group,
            biases + group});
      return;
    }
    for (int64_t t = 0; t < page_tokens; t++)
      std::memcpy(pool + (at * page_tokens + t) * size, x + t * token_bytes(), size);
  }

  // A token outside of the array is not written: its index is somebody's mistake, not somebody's
  // memory.
  void append(int64_t token, int32_t index, const void* x, bool narrow) const {
    if (index < 0 || index >= hot_pages * page_tokens) return;
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

// The work of `append`, for a shape: what stays the same from one step to the next. Inputs: index,
// each side's hot pages, and new tokens; where pages move, also moves and the pools' arrays.
struct Append {
  std::vector<Store> sides;
  int64_t tokens, moves;
  bool narrow;

  void operator()(const Inputs& in, const Outputs& out) const {
    std::vector<Store> stores = sides;
    const auto count = static_cast<int64_t>(stores.size());
    for (int64_t i = 0; i < count; i++) {
      stores[i].hot = static_cast<char*>(out[i]);
      stores[i].pack = i == 0 ? kernels().pack_keys : kernels().pack_values;
    }
    size_t at = count;
    for (int64_t i = 0; moves && i < count; i++) set_pool(stores[i], out, at);
    parallel_for(tokens, 64, [&](int64_t begin, int64_t end) {
      const auto* index = static_cast<const int32_t*>(in[0]);
      for (int64_t t = begin; t < end; t++)
        for (int64_t i = 0; i < count; i++)
          stores[i].append(t, index[t], in[1 + count + i], narrow);
    });
    // A page that is sealed may be completed in this very step: all tokens come first.
    const int64_t heads = sides[0].heads;
    const int64_t page_numbers = sides[0].page_tokens * sides[0].dim;
    const int64_t at_once = std::max<int64_t>(1, SMALL_SEAL / page_numbers);
    parallel_for(count * moves * heads, at_once, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const auto* move = static_cast<const int32_t*>(in[1 + 2 * count]) + i / (count * heads) * 2;
        stores[i / heads % count].seal(move[0], move[1], i % heads);
      }
    });
  }
};

void check_tokens(const char* op, const std::vector<mx::array>& x, const mx::array& index,
                  const CacheFormat& format) {
  if (x.size() != format.sides.size())
    refuse(op, std::to_string(x.size()) + " sides of new tokens for a cache of " +
                   std::to_string(format.sides.size()));
  require_ndim(op, "index", index, 1);
  require_dtype(op, "index", index, mx::int32);
  require_shape(op, "k", x[0], {index.shape(0), format.heads, format.dim});
  for (size_t i = 1; i < x.size(); i++) {
    require_shape(op, "v", x[i], x[0].shape());
    require_dtype(op, "v", x[i], x[0].dtype());
  }
}

std::vector<Store> stores_of(const CacheFormat& format) {
  Store store{};
  store.hot_pages = format.hot_pages, store.pool_pages = format.pool_pages;
  store.page_tokens = format.page_tokens;
  store.heads = format.heads, store.dim = format.dim;
  store.item = bytes_of(format.number), store.type = format.number;
  std::vector<Store> stores(format.sides.size(), store);
  for (size_t i = 0; i < stores.size(); i++) stores[i].format = format.sides[i];
  return stores;
}

// Puts tokens x, each side's [T, Hk, D], at flat hot positions index [T] int32, then seals pages
// (moves [n, 2] int32: hot page, pool page). Returns the sides of hot, then the pools' arrays.
// One op for all of it: nothing else holds a buffer of them in between, so they are written where
// they are.
std::vector<mx::array> append(const std::vector<mx::array>& hot,
                              const std::vector<PoolArrays>& pool, const mx::array& index,
                              const std::vector<mx::array>& x,
                              const std::optional<mx::array>& moves) {
  const char* op = "append";
  const CacheFormat format = check_cache(op, {hot, pool});
  check_tokens(op, x, index, format);
  const bool narrow = x[0].dtype() != hot[0].dtype();
  if (narrow) require_dtype(op, "k", x[0], mx::float32);
  std::vector<mx::array> inputs = {index}, pools;
  std::vector<OutputSpec> outputs;
  const auto written_in_place = [&](const mx::array& a) {
    outputs.push_back({a.shape(), a.dtype(), static_cast<int>(inputs.size())});
    inputs.push_back(a);
  };
  for (const auto& side : hot) written_in_place(side);
  inputs.insert(inputs.end(), x.begin(), x.end());
  for (const auto& side : pool) pools.insert(pools.end(), side.begin(), side.end());
  int n_moves = 0;
  if (moves) {
    require_dtype(op, "moves", *moves, mx::int32);
    require_ndim(op, "moves", *moves, 2);
    n_moves = moves->shape(0);
    require_shape(op, "moves", *moves, {n_moves, 2});
    inputs.push_back(*moves);
    for (const auto& a : pools) written_in_place(a);
  }
  auto made = lazy(op, inputs, outputs, Append{stores_of(format), index.shape(0), n_moves, narrow});
  if (!moves) made.insert(made.end(), pools.begin(), pools.end());
  return made;
}

}  // namespace

void bind_append(nb::module_& m) {
  m.def("append", &append, "hot"_a, "pool"_a, "index"_a, "x"_a, "moves"_a.none());
}

}  // namespace mlxserve
