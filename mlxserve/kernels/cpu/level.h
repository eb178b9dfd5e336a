// All kernels of one instruction level. The compiler's flags for the file that includes this decide
// which; see setup.py.
#pragma once

#include "attention.h"
#include "matmul.h"
#include "pack_pages.h"
#include "quantize.h"
#include "quantize_floats.h"
#include "rope.h"
#include "rows.h"
#include "select.h"

namespace KERNELS {

static constexpr mlxserve::Kernels table(const char* name) {
  return {name,     matmul,    to_whole,    rms_norm, add_rms_norm, layer_norm,      gated,
          soft_cap, rope,      select,      greedy,   quantize,     quantize_floats, attend,
          merge,    pack_keys, pack_values, to_cache};
}

}  // namespace KERNELS
