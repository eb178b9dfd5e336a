#include "cache_arrays.h"

namespace mlxserve {
namespace {

Number number_of(const char* op, const char* argument, const mx::array& a) {
  if (const auto number = as_number(a.dtype())) return *number;
  refuse(op, std::string(argument) + " is " + text(a.dtype()) +
                 ", expected float32, float16 or bfloat16");
}

// outer: pages, heads and rows of the codes. Of keys, a row is a channel; of values, a token.
PageFormat check_packed(const char* op, const std::string& name, const PoolArrays& pool,
                        const mx::Shape& outer, int group, int groups_per_row) {
  const std::string names[] = {name + ".codes", name + ".scales", name + ".biases"};
  const int unit = groups_per_row * group / 32;  // words for each bit of a code
  require_dtype(op, names[0].c_str(), pool[0], mx::uint32);
  mx::Shape codes = outer, per_group = outer;
  const int words = pool[0].shape(3), bits = words == 4 * unit ? 4 : 8;
  if (words != bits * unit)
    refuse(op, names[0] + " is " + text(pool[0].shape()) + ", expected rows of " +
                   std::to_string(4 * unit) + " or " + std::to_string(8 * unit) +
                   " words, for 4 or 8 bits");
  codes.push_back(words);
  if (group == VALUE_GROUP) per_group.push_back(groups_per_row);
  require_shape(op, names[0].c_str(), pool[0], codes);
  for (int i = 1; i < 3; i++) {
    require_dtype(op, names[i].c_str(), pool[i], mx::float16);
    require_shape(op, names[i].c_str(), pool[i], per_group);
  }
  return {bits, group, outer[2] * groups_per_row};
}

PageFormat check_pool(const char* op, const char* name, const PoolArrays& pool,
                      const mx::array& hot, int pages, bool keys) {
  const int heads = hot.shape(1), dim = hot.shape(2);
  require_ndim(op, name, pool[0], 4);
  if (pool.size() == 1) {
    require_shape(op, name, pool[0], {pages, heads, PAGE, dim});
    require_dtype(op, name, pool[0], hot.dtype());
    return {};
  }
  if (keys) return check_packed(op, name, pool, {pages, heads, dim}, PAGE, 1);
  const int groups = (dim + VALUE_GROUP - 1) / VALUE_GROUP;
  return check_packed(op, name, pool, {pages, heads, PAGE}, VALUE_GROUP, groups);
}

}  // namespace

CacheFormat check_cache(const char* op, const mx::array& hot_k, const mx::array& hot_v,
                        const PoolArrays& pool_k, const PoolArrays& pool_v) {
  require_ndim(op, "hot_k", hot_k, 3);
  const Number number = number_of(op, "hot_k", hot_k);
  require_shape(op, "hot_v", hot_v, hot_k.shape());
  require_dtype(op, "hot_v", hot_v, hot_k.dtype());
  if (hot_k.shape(0) % PAGE || hot_k.shape(1) < 1 || hot_k.shape(2) < 1)
    refuse(op, "hot_k is " + text(hot_k.shape()) + ", expected whole pages of 64 tokens");
  for (const auto* pool : {&pool_k, &pool_v})
    if (pool->size() != 1 && pool->size() != 3)
      refuse(op, "a pool has " + std::to_string(pool->size()) +
                     " arrays, expected one, or codes, scales and biases");
  require_ndim(op, "pool_k", pool_k[0], 4);
  const int pages = pool_k[0].shape(0);
  return {number, check_pool(op, "pool_k", pool_k, hot_k, pages, true),
          check_pool(op, "pool_v", pool_v, hot_k, pages, false), pages};
}

}  // namespace mlxserve
