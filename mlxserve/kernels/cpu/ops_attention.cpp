#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlxserve {
namespace {

using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr int COLUMNS = sizeof(PagedRow) / sizeof(int32_t);

int64_t pages_of(const PagedRow& row) {
  return (static_cast<int64_t>(row.start) + row.n + PAGE - 1) / PAGE - row.base_page;
}

// What the rows of a step need, in sum. Throws where rows and pages don't fit together.
struct RowsNeed {
  int64_t tokens = 0;
  int64_t pool_pages = 0, hot_pages = 0;  // by the largest id

  RowsNeed(const PagedRow* rows, size_t count_rows, const int32_t* pages, size_t count_pages) {
    const char* op = "PagedRows";
    for (size_t i = 0; i < count_rows; i++) {
      const PagedRow& row = rows[i];
      const std::string name = "row " + std::to_string(i);
      if (row.n < 1 || row.first != tokens)
        refuse(op, name + " doesn't begin where the one before ends, or is empty");
      tokens += row.n;
      const int64_t count = pages_of(row), end = row.pages_at + count;
      if (row.start < 0 || row.base_page < 0 || row.base_page * int64_t{PAGE} > row.start)
        refuse(op, name + " begins before its first page");
      if (int64_t{row.start} + row.n > std::numeric_limits<int32_t>::max())
        refuse(op, name + " ends beyond what 32 bits can count");
      if (row.sealed < 0 || row.sealed > count || row.pages_at < 0 ||
          end > static_cast<int64_t>(count_pages))
        refuse(op, name + " needs " + std::to_string(count) + " pages, which it doesn't have");
      for (int64_t j = 0; j < count; j++) {
        const int64_t id = pages[row.pages_at + j];
        if (id < 0) refuse(op, name + " has a page with the id " + std::to_string(id));
        int64_t& most = j < row.sealed ? pool_pages : hot_pages;
        most = std::max(most, id + 1);
      }
    }
  }
};

// The rows as Python has them, checked.
struct PagedRows {
  std::vector<PagedRow> rows;
  RowsNeed need;

  static PagedRows checked(const Table& table, const Ids& pages) {
    if (table.shape(1) != COLUMNS)
      refuse("PagedRows", "the table has " + std::to_string(table.shape(1)) +
                              " columns, expected " + std::to_string(COLUMNS));
    const auto* rows = reinterpret_cast<const PagedRow*>(table.data());
    return {{rows, rows + table.shape(0)}, {rows, table.shape(0), pages.data(), pages.size()}};
  }
};

// What there is for them.
struct CacheSize {
  int64_t tokens, hot_pages, pool_pages;
};

Number number_of(const char* op, const char* argument, const mx::array& a) {
  if (a.dtype() == mx::float32) return Number::f32;
  if (a.dtype() == mx::float16) return Number::f16;
  if (a.dtype() == mx::bfloat16) return Number::bf16;
  refuse(op, std::string(argument) + " is " + text(a.dtype()) +
                 ", expected float32, float16 or bfloat16");
}

// K and V arrays of one layer: of one type, with the same heads.
void check_cache(const char* op, const mx::array& hot_k, const mx::array& hot_v,
                 const mx::array& pool_k, const mx::array& pool_v) {
  require_ndim(op, "hot_k", hot_k, 3);
  require_ndim(op, "pool_k", pool_k, 4);
  number_of(op, "hot_k", hot_k);
  require_shape(op, "hot_v", hot_v, hot_k.shape());
  require_shape(op, "pool_k", pool_k, {pool_k.shape(0), hot_k.shape(1), PAGE, hot_k.shape(2)});
  require_shape(op, "pool_v", pool_v, pool_k.shape());
  require_dtype(op, "hot_v", hot_v, hot_k.dtype());
  require_dtype(op, "pool_k", pool_k, hot_k.dtype());
  require_dtype(op, "pool_v", pool_v, hot_k.dtype());
  if (hot_k.shape(0) % PAGE || hot_k.shape(1) < 1 || hot_k.shape(2) < 1)
    refuse(op, "hot_k is " + text(hot_k.shape()) + ", expected whole pages of 64 tokens");
}

void check_rows(const RowsNeed& need, const PagedRow* rows, size_t count, const Attention& a,
                const CacheSize& size) {
  const char* op = "paged_attention";
  if (need.tokens != size.tokens)
    refuse(op, "rows cover " + std::to_string(need.tokens) + " tokens, q has " +
                   std::to_string(size.tokens));
  if (need.hot_pages > size.hot_pages || need.pool_pages > size.pool_pages)
    refuse(op, "the rows' pages reach to hot page " + std::to_string(need.hot_pages) +
                   " and pool page " + std::to_string(need.pool_pages) + ", there are " +
                   std::to_string(size.hot_pages) + " and " + std::to_string(size.pool_pages));
  for (size_t i = 0; i < count; i++)
    if (a.low(rows[i].start) < rows[i].base_page * int64_t{PAGE})
      refuse(op, "row " + std::to_string(i) + " sees keys before its first page");
}

// The rows are an input like any other, so that a compiled graph can be given new ones. They were
// checked when they were made; should they not fit these arrays after all, the result is not a
// number.
void attend(const Attention& a, size_t count, size_t pages, const CacheSize& size) {
  try {
    check_rows(RowsNeed(a.rows, count, a.pages, pages), a.rows, count, a, size);
  } catch (const std::invalid_argument&) {
    std::fill_n(a.out, size.tokens * a.q_heads * a.dim, __builtin_nanf(""));
    return;
  }
  run_attention(a, static_cast<int>(count));
}

mx::array attention(const mx::array& q, const mx::array& hot_k, const mx::array& hot_v,
                    const mx::array& pool_k, const mx::array& pool_v, const PagedRows& rows,
                    const mx::array& table, const mx::array& pages, float scale,
                    std::optional<int64_t> window, const std::optional<mx::array>& sinks,
                    std::optional<float> softcap) {
  const char* op = "paged_attention";
  require_ndim(op, "q", q, 3);
  require_dtype(op, "q", q, mx::float32);
  check_cache(op, hot_k, hot_v, pool_k, pool_v);
  Attention a{};
  a.cache = number_of(op, "hot_k", hot_k);
  a.q_heads = q.shape(1), a.kv_heads = hot_k.shape(1), a.dim = q.shape(2);
  if (a.q_heads % a.kv_heads)
    refuse(op, std::to_string(a.q_heads) + " query heads can't share " +
                   std::to_string(a.kv_heads) + " key heads evenly");
  if (int64_t{q.shape(0)} * a.group() > std::numeric_limits<int32_t>::max() - PART_QUERIES)
    refuse(op, "q is " + text(q.shape()) + ", too many queries");
  if (a.dim != hot_k.shape(2))
    refuse(op, "q has D=" + std::to_string(a.dim) +
                   ", the cache has D=" + std::to_string(hot_k.shape(2)));
  if (window && *window < 1)
    refuse(op, "window is " + std::to_string(*window) + ", expected 1 or more");
  if (softcap && !(*softcap > 0))
    refuse(op, "softcap is " + std::to_string(*softcap) + ", expected more than 0");
  a.scale = scale, a.softcap = softcap.value_or(0), a.window = window.value_or(0);
  const CacheSize size{q.shape(0), hot_k.shape(0) / PAGE, pool_k.shape(0)};
  check_rows(rows.need, rows.rows.data(), rows.rows.size(), a, size);
  require_dtype(op, "table", table, mx::int32);
  require_dtype(op, "pages", pages, mx::int32);
  require_shape(op, "table", table, {static_cast<int>(rows.rows.size()), COLUMNS});
  std::vector<mx::array> inputs = {q, hot_k, hot_v, pool_k, pool_v, table, pages};
  if (sinks) {
    require_dtype(op, "sinks", *sinks, mx::float32);
    require_shape(op, "sinks", *sinks, {a.q_heads});
    inputs.push_back(*sinks);
  }
  const size_t count = rows.rows.size(), ids = pages.size();
  return lazy(op, inputs, {{q.shape(), mx::float32}},
              [a, count, ids, size](const Inputs& in, const Outputs& out) {
                Attention now = a;
                now.q = static_cast<const float*>(in[0]);
                now.out = static_cast<float*>(out[0]);
                now.hot_k = in[1], now.hot_v = in[2], now.pool_k = in[3], now.pool_v = in[4];
                now.rows = static_cast<const PagedRow*>(in[5]);
                now.pages = static_cast<const int32_t*>(in[6]);
                now.sinks = in.size() > 7 ? static_cast<const float*>(in[7]) : nullptr;
                attend(now, count, ids, size);
              })[0];
}

// One layer's keys or values while new tokens are added.
struct Store {
  char* hot;
  char* pool;
  int64_t hot_tokens, pool_pages, heads, dim, item;
  Number type;

  int64_t token_bytes() const { return heads * dim * item; }

  // Hot page to pool page, token-major to head-major.
  void seal(int64_t from, int64_t to) const {
    if (from < 0 || from >= hot_tokens / PAGE || to < 0 || to >= pool_pages) return;
    const int64_t size = dim * item;
    const char* page = hot + from * PAGE * token_bytes();
    char* at = pool + to * PAGE * token_bytes();
    for (int64_t head = 0; head < heads; head++)
      for (int64_t t = 0; t < PAGE; t++, at += size)
        std::memcpy(at, page + t * token_bytes() + head * size, size);
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

// Seals pages (moves [n, 2] int32: hot page, pool page), then puts tokens k, v [T, Hk, D] at flat
// hot positions index [T] int32. Returns the four arrays. One op for all of it: nothing else holds
// a buffer of them in between, so they are written where they are.
std::vector<mx::array> append(const mx::array& hot_k, const mx::array& hot_v,
                              const mx::array& pool_k, const mx::array& pool_v,
                              const mx::array& index, const mx::array& k, const mx::array& v,
                              const std::optional<mx::array>& moves) {
  const char* op = "append";
  check_cache(op, hot_k, hot_v, pool_k, pool_v);
  require_ndim(op, "index", index, 1);
  require_dtype(op, "index", index, mx::int32);
  require_shape(op, "k", k, {index.shape(0), hot_k.shape(1), hot_k.shape(2)});
  require_shape(op, "v", v, k.shape());
  require_dtype(op, "v", v, k.dtype());
  const bool narrow = k.dtype() != hot_k.dtype();
  if (narrow) require_dtype(op, "k", k, mx::float32);
  std::vector<mx::array> inputs = {hot_k, hot_v, index, k, v};
  std::vector<OutputSpec> outputs = {{hot_k.shape(), hot_k.dtype(), 0},
                                     {hot_v.shape(), hot_v.dtype(), 1}};
  int n_moves = 0;
  if (moves) {
    require_dtype(op, "moves", *moves, mx::int32);
    require_ndim(op, "moves", *moves, 2);
    n_moves = moves->shape(0);
    require_shape(op, "moves", *moves, {n_moves, 2});
    inputs.insert(inputs.end(), {pool_k, pool_v, *moves});
    outputs.push_back({pool_k.shape(), pool_k.dtype(), 5});
    outputs.push_back({pool_v.shape(), pool_v.dtype(), 6});
  }
  const Store store{nullptr,
                    nullptr,
                    hot_k.shape(0),
                    pool_k.shape(0),
                    hot_k.shape(1),
                    hot_k.shape(2),
                    static_cast<int64_t>(hot_k.itemsize()),
                    number_of(op, "hot_k", hot_k)};
  auto made =
      lazy(op, inputs, outputs,
           [store, narrow, n_moves, tokens = index.shape(0)](const Inputs& in, const Outputs& out) {
             Store stores[2] = {store, store};
             for (int i = 0; i < 2; i++) {
               stores[i].hot = static_cast<char*>(out[i]);
               stores[i].pool = n_moves ? static_cast<char*>(out[2 + i]) : nullptr;
             }
             // A page that is sealed may be written anew in this very step: all seals come first.
             parallel_for(2 * n_moves, 2, [&](int64_t begin, int64_t end) {
               for (int64_t i = begin; i < end; i++) {
                 const auto* move = static_cast<const int32_t*>(in[7]) + i / 2 * 2;
                 stores[i % 2].seal(move[0], move[1]);
               }
             });
             parallel_for(tokens, 64, [&](int64_t begin, int64_t end) {
               const auto* at = static_cast<const int32_t*>(in[2]);
               for (int64_t t = begin; t < end; t++)
                 for (int i = 0; i < 2; i++) stores[i].append(t, at[t], in[3 + i], narrow);
             });
           });
  if (!moves) made.insert(made.end(), {pool_k, pool_v});
  return made;
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<PagedRows>(m, "PagedRows")
      .def(
          "__init__",
          [](PagedRows* self, const Table& table, const Ids& pages) {
            new (self) PagedRows(PagedRows::checked(table, pages));
          },
          "table"_a, "pages"_a);
  m.def("paged_attention", &attention, "q"_a, "hot_k"_a, "hot_v"_a, "pool_k"_a, "pool_v"_a,
        "rows"_a, "table"_a, "page_ids"_a, "scale"_a, "window"_a.none(), "sinks"_a.none(),
        "softcap"_a.none());
  m.def("append", &append, "hot_k"_a, "hot_v"_a, "pool_k"_a, "pool_v"_a, "index"_a, "k"_a, "v"_a,
        "moves"_a.none());
}

}  // namespace mlxserve
