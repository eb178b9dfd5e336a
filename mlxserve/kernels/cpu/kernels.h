// What a kernel computes, as plain structs of pointers and sizes, and the table of one instruction
// level's kernels. Each function works on a range of its items, so that the caller may spread them
// over threads; none of them allocates or throws.
#pragma once

#include "paged.h"
#include "panels.h"

namespace mlxserve {

// Rows of x as whole numbers, a scale per row and group: x = q * scale.
struct WholeRows {
  int16_t* q;     // [M, K]
  float* scales;  // [M, groups]
  int32_t* sums;  // [M, groups], of q
  float* totals;  // [M, groups]: sum times scale
};

// out[m, n] = sum over k of x[m, k] * w[n, k], + bias[n].
struct Matmul {
  const float* x;     // [M, K]
  WholeRows whole;    // x again, in the weight's groups, where the weight is made of whole numbers
  Panels w;           // [N, K]
  const float* bias;  // [N] or null
  float* out;         // [M, N]
  int64_t m;
  const int32_t* out_rows;  // [M]: the row of out that each row of x becomes; null: the same
};

// Which matrix of a stack [E, N, K] each row of a gathered matmul is multiplied with.
struct Choices {
  const int32_t* ids;  // [rows]
  int64_t rows, experts;
  int64_t rows_per_x;  // so many neighbours share a row of x
};

// out = x / rms(x) * weight
struct RmsNorm {
  const float* x;       // [rows, d]
  const float* weight;  // [d]
  float* out;
  int64_t d;
  float eps;
};

// sum = stream + y, or stream + y / rms(y) * inner; out = sum / rms(sum) * weight
struct AddRmsNorm {
  const float* y;       // [rows, d]
  const float* stream;  // [rows, d]
  const float* weight;  // [d]
  const float* inner;   // [d] or null
  float* sum;
  float* out;
  int64_t d;
  float eps;
};

struct LayerNorm {
  const float* x;       // [T, d]
  const float* weight;  // [d]
  const float* bias;    // [d] or null
  float* out;           // [T, d]
  int64_t d;
  float eps;
};

// out = activation(gate) * up
enum class Gate : int { silu, gelu_tanh };
struct Gated {
  const float* gate;
  const float* up;
  float* out;
  Gate kind;
};

// out = cap * tanh(x / cap)
struct SoftCap {
  const float* x;
  float* out;
  float cap;
};

// Pair (i, i + dim / 2) turned by position / periods[i] and scaled by gain.
constexpr int MAX_ROPE_DIM = 1024;
struct Rope {
  const float* q;            // [T, q_heads, dim]
  const float* k;            // [T, k_heads, dim]
  const int32_t* positions;  // [T]
  const float* periods;      // [dim / 2]
  const float* q_norm;       // [dim] or null: weight of an RMS norm of each head, before
  const float* k_norm;       // [dim] or null
  float* q_out;
  float* k_out;
  int64_t q_heads, k_heads, dim;
  float gain, eps;
};

// How a token is drawn from a row: top_k 0, top_p 1 and min_p 0 are off.
struct Filter {
  uint32_t key[2];
  float temperature;
  int64_t top_k;
  float top_p, min_p;
};
struct Select {
  const float* logits;    // [B, vocab]
  const Filter* filters;  // [B]
  int32_t* ids;           // [B] or null
  float* filtered;        // [B, vocab] or null
  int64_t vocab;
};
struct Greedy {
  const float* logits;  // [B, vocab]
  int32_t* ids;         // [B]
  bool* finite;         // [B]
  int64_t vocab;
};

// w in groups along its rows, each with a scale and a bias: w = q * scale + bias.
struct Quantize {
  const void* w;  // whole groups, of `number`
  Number number;  // f32, f16 or bf16
  uint8_t* out;   // bits of q end to end, low bits first
  void* scales;   // [groups], of `number`
  void* biases;   // [groups], of `number`
  float* errors;  // [2]: sums of squares over the groups, of what rounding changes, and of w
  int bits, group;
};

// w in groups along its rows, each with a scale: floats of 4 (E2M1) or 8 bits (E4M3) times a power
// of two (E8M0, groups of 32) or an E4M3 number (groups of 16).
struct QuantizeFloats {
  const void* w;  // whole groups, of `number`
  Number number;  // f32, f16 or bf16
  uint8_t* out;   // codes end to end, low bits first
  uint8_t* scales;
  float* errors;    // as above
  int bits, group;  // 4 and 32, 8 and 32, or 4 and 16
};

// A head's page of keys or values, to be packed.
struct PackPage {
  const void* x;          // [tokens, dim] of `number`
  int64_t stride;         // between tokens, in numbers
  Number number;          // f32, f16 or bf16
  int tokens, dim, bits;  // bits: 8 or 4
  uint8_t* codes;
  uint16_t *scales, *biases;
};

struct Kernels {
  const char* name;
  // Panels begin .. end of rows row_begin .. row_end.
  void (*matmul)(const Matmul&, int64_t panel_begin, int64_t panel_end, int64_t row_begin,
                 int64_t row_end);
  // x [K] to a row of out; group: a multiple of 16.
  void (*to_whole)(const float* x, int64_t k, int group, const WholeRows& out, int64_t row);
  // Rows begin .. end.
  void (*rms_norm)(const RmsNorm&, int64_t begin, int64_t end);
  void (*add_rms_norm)(const AddRmsNorm&, int64_t begin, int64_t end);
  void (*layer_norm)(const LayerNorm&, int64_t begin, int64_t end);
  // Numbers begin .. end.
  void (*gated)(const Gated&, int64_t begin, int64_t end);
  // Numbers begin .. end.
  void (*soft_cap)(const SoftCap&, int64_t begin, int64_t end);
  // Tokens begin .. end.
  void (*rope)(const Rope&, int64_t begin, int64_t end);
  // Rows begin .. end.
  void (*select)(const Select&, int64_t begin, int64_t end);
  void (*greedy)(const Greedy&, int64_t begin, int64_t end);
  // Groups begin .. end.
  void (*quantize)(const Quantize&, int64_t begin, int64_t end);
  void (*quantize_floats)(const QuantizeFloats&, int64_t begin, int64_t end);
  // One part, in scratch_floats floats of scratch. partials: null to write its queries' results,
  // else [blocks of the part, queries, partial_floats], to be merged.
  void (*attend)(const Attention&, const AttentionPart&, float* partials, float* scratch);
  // Blocks of partials into the states [queries, partial_floats] of queries begin .. end of a part;
  // first: begin them; last: write the results.
  void (*merge)(const Attention&, const AttentionPart&, const float* partials, float* states,
                bool first, bool last, int64_t begin, int64_t end);
  void (*pack_keys)(const PackPage&);
  void (*pack_values)(const PackPage&);
  // float32 numbers in float16 or bfloat16.
  void (*to_cache)(const float* x, uint16_t* out, Number type, int64_t count);
};

extern const Kernels kernels_avx512vnni, kernels_avx512, kernels_avx2, kernels_portable;

// All rows; see attention.cpp.
void run_attention(const Attention&, int n_rows);

// Several weights of one K with the same x [M, K]; see matmul.cpp.
void run_matmul(const Matmul* jobs, int n_jobs);
// The same for stacks of weights: w is the first matrix of its stack, bias [E, N], out [rows, N]; m
// and out_rows are found from the choices. Rows whose expert doesn't exist are filled with NaN.
void run_gathered_matmul(const Matmul* jobs, int n_jobs, const Choices&);

// The best level that this processor has, or the one that set_level chose.
const Kernels& kernels();
// False if the name is unknown or the processor can't run it.
bool set_level(const char* name);

}  // namespace mlxserve
