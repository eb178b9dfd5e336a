#include "cache_arrays.h"

namespace mlxserve {
namespace {

constexpr const char* HOT[] = {"hot_k", "hot_v"};
constexpr const char* POOL[] = {"pool_k", "pool_v"};

Number number_of(const char* op, const char* argument, const mx::array& a) {
  if (const auto number = as_number(a.dtype())) return *number;
  refuse(op, std::string(argument) + " is " + text(a.dtype()) +
                 ", expected float32, float16 or bfloat16");
}

void check_sides(const char* op, const CacheArrays& cache) {
  const size_t sides = cache.hot.size();
  if (sides < 1 || sides > 2 || cache.pool.size() != sides)
    refuse(op, "hot has " + std::to_string(sides) + " sides and pool has " +
                   std::to_string(cache.pool.size()) + ", expected keys and values, or keys alone");
  for (size_t i = 0; i < sides; i++) {
    const PoolArrays& pool = cache.pool[i];
    if (pool.size() != 1 && pool.size() != 3)
      refuse(op, "a pool has " + std::to_string(pool.size()) +
                     " arrays, expected one, or codes, scales and biases");
    if (sides == 1 && pool.size() != 1)
      refuse(op, "pool_k is packed, expected plain numbers where keys are the values too");
    require_ndim(op, HOT[i], cache.hot[i], 3);
    require_ndim(op, POOL[i], pool[0], 4);
  }
}

// outer: pages, heads and rows of the codes. Of keys, a row is a channel; of values, a token.
PageFormat check_packed(const char* op, const std::string& name, const PoolArrays& pool,
                        const mx::Shape& outer, int group, int groups_per_row, bool keys) {
  const std::string names[] = {name + ".codes", name + ".scales", name + ".biases"};
  require_dtype(op, names[0].c_str(), pool[0], mx::uint32);
  const int words = pool[0].shape(3), numbers = groups_per_row * group;
  const int bits = words * 32 == numbers * 4 ? 4 : 8;
  if (words * 32 != numbers * bits)
    refuse(op, names[0] + " is " + text(pool[0].shape()) + ", expected rows of " +
                   std::to_string(numbers) + " codes in words, of 4 or 8 bits each");
  mx::Shape codes = outer, per_group = outer;
  codes.push_back(words);
  if (!keys) per_group.push_back(groups_per_row);
  require_shape(op, names[0].c_str(), pool[0], codes);
  for (int i = 1; i < 3; i++) {
    require_dtype(op, names[i].c_str(), pool[i], mx::float16);
    require_shape(op, names[i].c_str(), pool[i], per_group);
  }
  return {bits, group, outer[2] * groups_per_row};
}

PageFormat check_pool(const char* op, const char* name, const PoolArrays& pool,
                      const CacheFormat& format, mx::Dtype dtype, bool keys) {
  const int pages = format.pool_pages, heads = format.heads, dim = format.dim;
  if (pool.size() == 1) {
    require_shape(op, name, pool[0], {pages, heads, format.page_tokens, dim});
    require_dtype(op, name, pool[0], dtype);
    return {};
  }
  if (keys) return check_packed(op, name, pool, {pages, heads, dim}, format.page_tokens, 1, true);
  const int groups = (dim + VALUE_GROUP - 1) / VALUE_GROUP;
  const mx::Shape outer = {pages, heads, format.page_tokens};
  return check_packed(op, name, pool, outer, VALUE_GROUP, groups, false);
}

}  // namespace

CacheFormat check_cache(const char* op, const CacheArrays& cache) {
  check_sides(op, cache);
  const mx::array &hot = cache.hot[0], &last = cache.pool.back()[0];
  CacheFormat format{
      number_of(op, "hot_k", hot), last.shape(2), 0, 0, hot.shape(1), hot.shape(2), {}};
  const int tokens = format.page_tokens;
  if (tokens < MIN_PAGE || tokens > MAX_PAGE || (tokens & (tokens - 1)))
    refuse(op, std::string(POOL[cache.pool.size() - 1]) + " is " + text(last.shape()) +
                   ", expected pages of a power of two of tokens, from 4 to 64");
  for (size_t i = 1; i < cache.hot.size(); i++) {
    require_shape(op, HOT[i], cache.hot[i], hot.shape());
    require_dtype(op, HOT[i], cache.hot[i], hot.dtype());
  }
  if (hot.shape(0) % tokens || format.heads < 1 || format.dim < 1)
    refuse(op, "hot_k is " + text(hot.shape()) + ", expected whole pages of " +
                   std::to_string(tokens) + " tokens");
  format.hot_pages = hot.shape(0) / tokens;
  format.pool_pages = cache.pool[0][0].shape(0);
  for (size_t i = 0; i < cache.pool.size(); i++)
    format.sides.push_back(check_pool(op, POOL[i], cache.pool[i], format, hot.dtype(), i == 0));
  return format;
}

}  // namespace mlxserve
