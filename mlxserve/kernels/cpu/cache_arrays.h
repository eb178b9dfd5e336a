// One layer's cache as Python gives it.
#pragma once

#include <vector>

#include "op.h"
#include "paged.h"

namespace mlxserve {

// A pool's keys or values: a plain array, or codes, scales and biases.
using PoolArrays = std::vector<mx::array>;

struct CacheFormat {
  Number number;  // of hot pages and plain pools
  PageFormat keys, values;
  int pool_pages;
};

// Throws where the arrays aren't of one layer: see paged_attention in kernels/attention.py.
CacheFormat check_cache(const char* op, const mx::array& hot_k, const mx::array& hot_v,
                        const PoolArrays& pool_k, const PoolArrays& pool_v);

}  // namespace mlxserve
