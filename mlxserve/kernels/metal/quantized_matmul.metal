// x @ W.T for some rows of x, where W is packed in 4 or 8 bits as MLX packs it.
//
// A threadgroup takes NSG * OUTS outputs of ROWS rows, and a simdgroup OUTS of them. It goes along K
// in steps of 256: a lane takes eight weights of each output, which it unpacks to float32 once for all
// rows, and eight numbers of each row, which lie in threadgroup memory for all simdgroups. Each lane
// adds up its products in ascending k, in fused operations; at the end the lanes are added. So the
// order does not depend on ROWS, OUTS, NSG, or a row's place: a row has the same bits in every batch.
//
// Scales and biases are fewer than the lanes of a step need: a simdgroup loads those of many steps at
// once, a word of each to a lane, and passes them on.
//
// x [count, K]   words [N, K codes of BITS bits]   scales, biases [N, K / GROUP]   out [count, N]
// All but words in T. PAIR: numbers in a word of scales, 2 where a row has an even number of them.
constexpr int STEP = 256;
constexpr int OUTPUTS = NSG * OUTS;
constexpr int HELD = 32 * PAIR;  // groups of an output whose scales a simdgroup has at once

threadgroup uint2 tile[2 * ROWS * 32];  // of each lane: four numbers of x, and in the second half four
threadgroup float sums[ROWS * OUTPUTS];

const int lane = int(thread_index_in_simdgroup);
const int simd_gid = int(simdgroup_index_in_threadgroup);
const int count = x_shape[0];
const int k_size = x_shape[1];
const int n_size = scales_shape[0];
const int row_words = k_size / GROUP / PAIR;  // of an output's scales
const int first_out = int(threadgroup_position_in_grid.x) * OUTPUTS;
const int first_row = int(threadgroup_position_in_grid.y) * ROWS;

float sum[OUTS][ROWS];
uint scale_words[OUTS];
uint bias_words[OUTS];
int output[OUTS];
UNROLL for (int o = 0; o < OUTS; o++) {
  output[o] = metal::min(first_out + simd_gid * OUTS + o, n_size - 1);
  UNROLL for (int r = 0; r < ROWS; r++) sum[o][r] = 0.0f;
}

for (int k = 0; k < k_size; k += STEP) {
  if (k % (HELD * GROUP) == 0) {
    const int held = k / (GROUP * PAIR) + lane;
    UNROLL for (int o = 0; o < OUTS; o++) {
      const long word = long(output[o]) * row_words + held;
      scale_words[o] = held < row_words ? word_of<PAIR>(scales, word) : 0u;
      bias_words[o] = held < row_words ? word_of<PAIR>(biases, word) : 0u;
    }
  }
  const int at = k + lane * 8;
  const bool inside = at < k_size;
  uint2 codes[OUTS];
  UNROLL for (int o = 0; o < OUTS; o++)
    codes[o] = inside ? eight_codes<BITS>(words, (long(output[o]) * k_size + at) / 8) : uint2(0u);

  for (int r = simd_gid; r < ROWS; r += NSG) {
    uint4 eight = uint4(0u);
    if (inside && first_row + r < count)
      eight = ((const device uint4*)x)[(long(first_row + r) * k_size + at) / 8];
    tile[r * 32 + lane] = eight.xy;
    tile[(ROWS + r) * 32 + lane] = eight.zw;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const int group = at / GROUP % HELD;
  float scale[OUTS];
  float bias[OUTS];
  UNROLL for (int o = 0; o < OUTS; o++) {
    const float2 scale_pair = unpack<T>(simd_shuffle(scale_words[o], ushort(group / PAIR)));
    const float2 bias_pair = unpack<T>(simd_shuffle(bias_words[o], ushort(group / PAIR)));
    scale[o] = group % PAIR == 0 ? scale_pair.x : scale_pair.y;
    bias[o] = group % PAIR == 0 ? bias_pair.x : bias_pair.y;
  }
  UNROLL for (int half_of = 0; half_of < 2; half_of++) {
    float4 weight[OUTS];
    UNROLL for (int o = 0; o < OUTS; o++) {
      const uint four = half_of == 0 ? codes[o].x : codes[o].y;
      weight[o] = metal::fma(split<BITS>(four), float4(scale[o]), float4(bias[o]));
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
      const uint2 four = tile[(half_of * ROWS + r) * 32 + lane];
      const float2 a = unpack<T>(four.x);
      const float2 b = unpack<T>(four.y);
      UNROLL for (int o = 0; o < OUTS; o++) {
        sum[o][r] = metal::fma(weight[o].x, a.x, sum[o][r]);
        sum[o][r] = metal::fma(weight[o].y, a.y, sum[o][r]);
        sum[o][r] = metal::fma(weight[o].z, b.x, sum[o][r]);
        sum[o][r] = metal::fma(weight[o].w, b.y, sum[o][r]);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Through threadgroup memory, so that an output row is written in whole pieces.
UNROLL for (int r = 0; r < ROWS; r++) {
  UNROLL for (int o = 0; o < OUTS; o++) {
    const float total = simd_sum(sum[o][r]);
    if (lane == 0) sums[r * OUTPUTS + simd_gid * OUTS + o] = total;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int i = simd_gid * 32 + lane; i < ROWS * OUTPUTS; i += NSG * 32) {
  const int row = first_row + i / OUTPUTS;
  const int column = first_out + i % OUTPUTS;
  if (row < count && column < n_size) out[long(row) * n_size + column] = T(sums[i]);
}
