#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "bind.h"
#include "cache_arrays.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mlxserve {
namespace {

using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr int COLUMNS = sizeof(PagedRow) / sizeof(int32_t);

int64_t pages_of(const PagedRow& row, int page_tokens) {
  const int64_t end = static_cast<int64_t>(row.start) + row.n;
  return row.index_of((end + page_tokens - 1) / page_tokens);
}

// What the rows of a step need, in sum. Throws where rows and pages don't fit together.
struct RowsNeed {
  int64_t tokens = 0;
  int64_t pool_pages = 0, hot_pages = 0;  // by the largest id

  RowsNeed(const PagedRow* rows, size_t count_rows, const int32_t* pages, size_t count_pages,
           int page_tokens) {
    const char* op = "PagedRows";
    for (size_t i = 0; i < count_rows; i++) {
      const PagedRow& row = rows[i];
      const std::string name = "row " + std::to_string(i);
      if (row.n < 1 || row.first != tokens)
        refuse(op, name + " doesn't begin where the one before ends, or is empty");
      tokens += row.n;
      if (row.start < 0 || row.base_page < 0 || row.base_page * int64_t{page_tokens} > row.start)
        refuse(op, name + " begins before its first page");
      if (row.kept < 0 || row.kept > row.base_page)
        refuse(op, name + " keeps " + std::to_string(row.kept) + " pages, its others begin at " +
                       std::to_string(row.base_page));
      const int64_t count = pages_of(row, page_tokens), end = row.pages_at + count;
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
  int page_tokens;
  RowsNeed need;

  static PagedRows checked(const Table& table, const Ids& pages, int page_tokens) {
    if (page_tokens < MIN_PAGE || page_tokens > MAX_PAGE || (page_tokens & (page_tokens - 1)))
      refuse("PagedRows", "page_tokens is " + std::to_string(page_tokens) +
                              ", expected a power of two from 4 to 64");
    if (table.shape(1) != COLUMNS)
      refuse("PagedRows", "the table has " + std::to_string(table.shape(1)) +
                              " columns, expected " + std::to_string(COLUMNS));
    const auto* rows = reinterpret_cast<const PagedRow*>(table.data());
    return {{rows, rows + table.shape(0)},
            page_tokens,
            {rows, table.shape(0), pages.data(), pages.size(), page_tokens}};
  }
};

// What there is for them.
struct CacheSize {
  int64_t tokens, hot_pages, pool_pages;
};

// Whether a query of the row sees keys of pages that it no longer has.
bool sees_missing_pages(const PagedRow& row, const Attention& a) {
  if (row.kept == row.base_page) return false;
  const int64_t tokens = a.page_tokens;
  return a.keep > row.kept * tokens || a.low(row.start) < row.base_page * tokens;
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
    if (sees_missing_pages(rows[i], a))
      refuse(op, "row " + std::to_string(i) + " sees keys of pages that it doesn't have");
}

// The rows are an input like any other, so that a compiled graph can be given new ones. They were
// checked when they were made; should they not fit these arrays after all, the result is not a
// number.
void attend(const Attention& a, size_t count, size_t pages, const CacheSize& size) {
  try {
    check_rows(RowsNeed(a.rows, count, a.pages, pages, a.page_tokens), a.rows, count, a, size);
  } catch (const std::invalid_argument&) {
    std::fill_n(a.out, size.tokens * a.q_heads * a.dim, __builtin_nanf(""));
    return;
  }
  run_attention(a, static_cast<int>(count));
}

PagePool pool_of(const PageFormat& format, const Inputs& in, size_t& at) {
  PagePool pool{in[at++], nullptr, nullptr, format};
  if (format.bits) {
    pool.scales = static_cast<const uint16_t*>(in[at++]);
    pool.biases = static_cast<const uint16_t*>(in[at++]);
  }
  return pool;
}

// What doesn't change with the arrays: sizes and options, checked.
Attention described(const char* op, const mx::array& q, const CacheFormat& format,
                    const PagedRows& rows, float scale, std::optional<int64_t> window,
                    std::optional<float> softcap, int64_t keep) {
  require_ndim(op, "q", q, 3);
  require_dtype(op, "q", q, mx::float32);
  Attention a{};
  a.cache = format.number, a.page_tokens = format.page_tokens;
  a.q_heads = q.shape(1), a.kv_heads = format.heads, a.dim = q.shape(2);
  if (a.q_heads % a.kv_heads)
    refuse(op, std::to_string(a.q_heads) + " query heads can't share " +
                   std::to_string(a.kv_heads) + " key heads evenly");
  if (int64_t{q.shape(0)} * a.group() > std::numeric_limits<int32_t>::max() - PART_QUERIES)
    refuse(op, "q is " + text(q.shape()) + ", too many queries");
  if (a.dim != format.dim)
    refuse(op,
           "q has D=" + std::to_string(a.dim) + ", the cache has D=" + std::to_string(format.dim));
  if (rows.page_tokens != a.page_tokens)
    refuse(op, "rows are of pages of " + std::to_string(rows.page_tokens) +
                   " tokens, the cache has pages of " + std::to_string(a.page_tokens));
  if (window && *window < 1)
    refuse(op, "window is " + std::to_string(*window) + ", expected 1 or more");
  if (keep < 0 || (keep > 0 && !window))
    refuse(op, "keep is " + std::to_string(keep) +
                   ", expected 0 or more, and 0 where there is no window");
  if (softcap && !(*softcap > 0))
    refuse(op, "softcap is " + std::to_string(*softcap) + ", expected more than 0");
  a.scale = scale, a.softcap = softcap.value_or(0);
  a.window = window.value_or(0), a.keep = keep;
  return a;
}

mx::array attention(const mx::array& q, const std::vector<mx::array>& hot,
                    const std::vector<PoolArrays>& pool, const PagedRows& rows,
                    const mx::array& table, const mx::array& pages, float scale,
                    std::optional<int64_t> window, int64_t keep,
                    const std::optional<mx::array>& sinks, std::optional<float> softcap) {
  const char* op = "paged_attention";
  const CacheFormat format = check_cache(op, {hot, pool});
  const Attention a = described(op, q, format, rows, scale, window, softcap, keep);
  const CacheSize size{q.shape(0), format.hot_pages, format.pool_pages};
  check_rows(rows.need, rows.rows.data(), rows.rows.size(), a, size);
  require_dtype(op, "table", table, mx::int32);
  require_dtype(op, "pages", pages, mx::int32);
  require_shape(op, "table", table, {static_cast<int>(rows.rows.size()), COLUMNS});
  // Where there is one side, it is given twice.
  std::vector<mx::array> inputs = {q, hot.front(), hot.back(), table, pages};
  inputs.insert(inputs.end(), pool.front().begin(), pool.front().end());
  inputs.insert(inputs.end(), pool.back().begin(), pool.back().end());
  if (sinks) {
    require_dtype(op, "sinks", *sinks, mx::float32);
    require_shape(op, "sinks", *sinks, {a.q_heads});
    inputs.push_back(*sinks);
  }
  const size_t count = rows.rows.size(), ids = pages.size();
  return lazy(op, inputs, {{q.shape(), mx::float32}},
              [a, count, ids, size, format](const Inputs& in, const Outputs& out) {
                Attention now = a;
                now.q = static_cast<const float*>(in[0]);
                now.out = static_cast<float*>(out[0]);
                now.hot_k = in[1], now.hot_v = in[2];
                now.rows = static_cast<const PagedRow*>(in[3]);
                now.pages = static_cast<const int32_t*>(in[4]);
                size_t at = 5;
                now.pool_k = pool_of(format.sides.front(), in, at);
                now.pool_v = pool_of(format.sides.back(), in, at);
                now.sinks = at < in.size() ? static_cast<const float*>(in[at]) : nullptr;
                attend(now, count, ids, size);
              })[0];
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<PagedRows>(m, "PagedRows")
      .def(
          "__init__",
          [](PagedRows* self, const Table& table, const Ids& pages, int page_tokens) {
            new (self) PagedRows(PagedRows::checked(table, pages, page_tokens));
          },
          "table"_a, "pages"_a, "page_tokens"_a);
  m.def("paged_attention", &attention, "q"_a, "hot"_a, "pool"_a, "rows"_a, "table"_a, "page_ids"_a,
        "scale"_a, "window"_a.none(), "keep"_a, "sinks"_a.none(), "softcap"_a.none());
}

}  // namespace mlxserve
