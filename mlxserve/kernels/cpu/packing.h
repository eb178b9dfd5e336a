// Weights to panels and back, once at load and for single rows: plain C++ for every machine.
#pragma once

#include "panels.h"

namespace mlxserve {

// A weight as checkpoints have it: dense [N, K], or as MLX packs it: q uint32 [N, K * bits / 32],
// low bits first; scales and biases (null where they aren't stored) [N, K / group].
struct RowMajor {
  const uint8_t* weight;
  const uint8_t* scales;
  const uint8_t* biases;
};

// One panel of 16 rows, into out [panel_bytes].
void pack_panel(const Panels& p, const RowMajor& from, int64_t panel, uint8_t* out);

// Row n as float32 [K].
void unpack_row(const Panels& p, int64_t n, float* out);

}  // namespace mlxserve
