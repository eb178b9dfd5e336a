// One layer's cache as Python gives it.
#pragma once

#include <vector>

#include "op.h"
#include "paged.h"

namespace mlxserve {

// Of one side of a pool, keys or values: a plain array, or codes, scales and biases.
using PoolArrays = std::vector<mx::array>;

// Keys and values, or one side that is both.
struct CacheArrays {
  std::vector<mx::array> hot;
  std::vector<PoolArrays> pool;
};

struct CacheFormat {
  Number number;  // of hot pages and plain pools
  int page_tokens, hot_pages, pool_pages, heads, dim;
  std::vector<PageFormat> sides;  // of the pool
};

// Throws where the arrays aren't of one layer: see paged_attention in kernels/attention.py.
CacheFormat check_cache(const char* op, const CacheArrays& cache);

}  // namespace mlxserve
