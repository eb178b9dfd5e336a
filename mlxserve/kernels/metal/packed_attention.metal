// Attention of one new token per row over its packed pages: a part of the context, for the query
// heads that share a KV head. Numbers are unpacked to float32, and never rounded to 16 bits.
//
// A threadgroup takes one item of `work`: some pages of one row, for H of the G query heads of a KV
// head. Its simdgroups take pages in turn and never wait for each other. Codes come through
// threadgroup memory, front to back, so that every load is coalesced. A channel's keys lie end to end:
// a lane takes two tokens and goes over the channels, so that a score needs no sum over lanes. A
// token's values lie end to end: a lane takes four channels and goes over the tokens. What is unpacked
// once serves all heads. What each simdgroup found is merged at the end, in their order.
//
// Keys of a page are read whole, values in whole tiles. What the part doesn't see changes nothing,
// whatever it is in values, and whatever finite number in keys: a group of keys with another one is
// NaN as a whole.
//
// A tile holds the keys of CHANNELS channels, or the values of TOKENS tokens; the scales of
// SCALED_CHANNELS and SCALED_TOKENS come together.
//
// k_codes [pages, Hk, D, 64 codes of KB bits]    k_scales, k_biases [pages, Hk, D]
// v_codes [pages, Hk, 64, DP codes of VB bits]   v_scales, v_biases [pages, Hk, 64, GROUPS]
// q, how, work, partial, tops: see paged_attention.metal. Where VB is 16, values are plain, in T.
constexpr int PAGE = 64;
constexpr int GROUPS = VB == 16 ? 0 : (D + 31) / 32;  // of a token's values, with a scale each
constexpr int DP = VB == 16 ? D : GROUPS * 32;
constexpr int QUADS = D / 4;  // of a token's channels
constexpr bool PAIRED = QUADS == 16;  // a simdgroup takes the values of two tokens at once
constexpr int TURNS = (QUADS + 31) / 32;  // quads per lane
constexpr bool FULL = PAIRED || QUADS % 32 == 0;  // all lanes have quads in every turn
constexpr int SIDE = PAIRED ? 1 : 2;  // tokens of a pair that a lane takes
constexpr int KEY_VECTORS = PAGE * KB / 128;  // of a channel; a vector is 16 bytes
constexpr int VALUE_VECTORS = DP * VB / 128;  // of a token
constexpr int KEYS_TILE = CHANNELS * KEY_VECTORS;
constexpr int VALUES_TILE = TOKENS * VALUE_VECTORS;
constexpr int TILE = KEYS_TILE > VALUES_TILE ? KEYS_TILE : VALUES_TILE;
constexpr int KEY_SCALES = SCALED_CHANNELS / 4;
constexpr int VALUE_SCALES = SCALED_TOKENS * GROUPS / 4;
constexpr int SCALES = KEY_SCALES > VALUE_SCALES ? KEY_SCALES : VALUE_SCALES;
constexpr int TOGETHER = TILE / QUADS;  // heads whose sums fit in a tile
constexpr float LOWEST = -1e30f;

threadgroup int task[4 + PAGES];
threadgroup uint4 tiles[NSG * TILE];
threadgroup uint4 affines[NSG * SCALES];
threadgroup float4 queries[H * QUADS];
threadgroup float2 found[NSG * H];

const int lane = int(thread_index_in_simdgroup);
const int simd_gid = int(simdgroup_index_in_threadgroup);
const int thread_id = simd_gid * 32 + lane;
const int item = int(threadgroup_position_in_grid.x);
const int kv_head = int(threadgroup_position_in_grid.y) / (G / H);
const int kv_heads = int(threadgroups_per_grid.y) / (G / H);
const int q_heads = kv_heads * G;
const int q_head = int(threadgroup_position_in_grid.y) * H;

// Once for all simdgroups: each would load the same lines.
if (thread_id < 4 + PAGES) task[thread_id] = work[item * (4 + PAGES) + thread_id];
threadgroup_barrier(mem_flags::mem_threadgroup);
const int part_begin = task[1];
const int part_end = task[2];

const float scale = how[0];
const device uint* q_words = (const device uint*)(q + (long(task[0]) * q_heads + q_head) * D);
for (int i = thread_id; i < H * D / 2; i += NSG * 32)
  ((threadgroup float2*)queries)[i] = unpack<T>(q_words[i]) * scale;
threadgroup_barrier(mem_flags::mem_threadgroup);

threadgroup uint4* tile = tiles + simd_gid * TILE;
threadgroup uint4* affine = affines + simd_gid * SCALES;
const threadgroup uint* affine_words = (const threadgroup uint*)affine;
const int quad = PAIRED ? lane % 16 : lane;

float top = LOWEST;  // of lane h: the largest score of head h, and its sum of p
float sum = 0.0f;
float4 out[H][TURNS];
UNROLL for (int h = 0; h < H; h++)
  UNROLL for (int i = 0; i < TURNS; i++) out[h][i] = float4(0.0f);

for (int page = simd_gid; page * PAGE < part_end; page += NSG) {
  const long at = long(task[4 + page]) * kv_heads + kv_head;
  const int begin = metal::max(part_begin - page * PAGE, 0);
  const int end = metal::min(part_end - page * PAGE, PAGE);

  const device uint4* keys = (const device uint4*)k_codes + at * (D * KEY_VECTORS);
  const device uint2* key_scales = (const device uint2*)k_scales + at * (D / 4);
  const device uint2* key_biases = (const device uint2*)k_biases + at * (D / 4);
  float2 score[H];
  UNROLL for (int h = 0; h < H; h++) score[h] = float2(0.0f);
  for (int c = 0; c < D; c += CHANNELS) {
    stage<KEYS_TILE>(tile, keys + c * KEY_VECTORS, lane);
    if (c % SCALED_CHANNELS == 0)
      stage_affine<KEY_SCALES>(affine, key_scales + c / 4, key_biases + c / 4, lane);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = 0; i < CHANNELS; i += 4) {
      const uint4 four = affine[(c % SCALED_CHANNELS + i) / 4];
      float2 key[4];
      UNROLL for (int k = 0; k < 4; k++) {
        const float2 by = unpack<half>(four[k]);
        key[k] = two_codes<KB>(tile, (i + k) * 32 + lane) * by.x + by.y;
      }
      UNROLL for (int h = 0; h < H; h++) {
        const float4 query = queries[h * QUADS + (c + i) / 4];
        score[h] += query.x * key[0] + query.y * key[1] + query.z * key[2] + query.w * key[3];
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }

  const int token = lane * 2;
  const bool sees_first = token >= begin && token < end;
  const bool sees_second = token + 1 >= begin && token + 1 < end;
  UNROLL for (int h = 0; h < H; h++) {
    if (SOFTCAP) score[h] = how[1] * metal::precise::tanh(score[h] / how[1]);
    const float x = sees_first ? score[h].x : LOWEST;
    const float y = sees_second ? score[h].y : LOWEST;
    const float before = simd_broadcast(top, ushort(h));
    const float now = metal::max(before, simd_max(metal::max(x, y)));
    const float keep = metal::precise::exp(before - now);
    score[h].x = sees_first ? metal::precise::exp(x - now) : 0.0f;
    score[h].y = sees_second ? metal::precise::exp(y - now) : 0.0f;
    const float total = simd_sum(score[h].x + score[h].y);
    if (lane == h) {
      top = now;
      sum = sum * keep + total;
    }
    UNROLL for (int i = 0; i < TURNS; i++) out[h][i] *= keep;
  }

  const device uint4* values = (const device uint4*)v_codes + at * (PAGE * VALUE_VECTORS);
  const device uint2* value_scales = (const device uint2*)v_scales + at * (PAGE * GROUPS / 4);
  const device uint2* value_biases = (const device uint2*)v_biases + at * (PAGE * GROUPS / 4);
  const int first_tile = begin / TOKENS * TOKENS;
  for (int t = first_tile; t < end; t += TOKENS) {
    stage<VALUES_TILE>(tile, values + t * VALUE_VECTORS, lane);
    if (t == first_tile || t % SCALED_TOKENS == 0) {
      const int scales_at = t / SCALED_TOKENS * VALUE_SCALES;
      stage_affine<VALUE_SCALES>(affine, value_scales + scales_at, value_biases + scales_at, lane);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int j = 0; j < TOKENS; j += 2) {
      float4 value[SIDE][TURNS];
      UNROLL for (int k = 0; k < SIDE; k++) {
        const int from = j + (PAIRED ? lane / 16 : k);
        const bool seen = t + from >= begin && t + from < end;
        UNROLL for (int i = 0; i < TURNS; i++) {
          value[k][i] = float4(0.0f);
          if (seen && (FULL || quad + i * 32 < QUADS)) {
            const int q_at = from * (DP / 4) + quad + i * 32;
            if (VB == 16) {
              const uint2 words = ((const threadgroup uint2*)tile)[q_at];
              value[k][i] = float4(unpack<T>(words.x), unpack<T>(words.y));
            } else {
              const int scaled_token = t % SCALED_TOKENS + from;
              const float2 by = unpack<half>(affine_words[scaled_token * GROUPS + quad / 8 + i * 4]);
              value[k][i] = four_codes<VB>(tile, q_at) * by.x + by.y;
            }
          }
        }
      }
      UNROLL for (int h = 0; h < H; h++) {
        const float2 weight = simd_broadcast(score[h], ushort((t + j) / 2));
        UNROLL for (int i = 0; i < TURNS; i++) {
          if (PAIRED)
            out[h][i] += (lane < 16 ? weight.x : weight.y) * value[0][i];
          else
            out[h][i] += weight.x * value[0][i] + weight.y * value[SIDE - 1][i];
        }
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

if (lane < H) found[simd_gid * H + lane] = float2(top, sum);
device float4* partial_quads = (device float4*)partial;
device float2* tops_pairs = (device float2*)tops;
const int items = int(threadgroups_per_grid.x);
const long out_at = (long(item) * q_heads + q_head) * QUADS;
// Each simdgroup's tile takes its sums, of as many heads as it has room for.
UNROLL for (int first = 0; first < H; first += TOGETHER) {
  UNROLL for (int n = 0; n < TOGETHER; n++) {
    if (first + n < H) {
      UNROLL for (int i = 0; i < TURNS; i++) {
        float4 value = out[first + n][i];
        if (PAIRED) value += simd_shuffle_xor(value, ushort(16));
        const int at = quad + i * 32;
        if ((!PAIRED || lane < 16) && (FULL || at < QUADS))
          ((threadgroup float4*)tile)[n * QUADS + at] = value;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int count = metal::min(TOGETHER, H - first);
  for (int i = thread_id; i < count * QUADS; i += NSG * 32) {
    const int h = first + i / QUADS;
    float largest = LOWEST;
    for (int s = 0; s < NSG; s++) largest = metal::max(largest, found[s * H + h].x);
    float total = 0.0f;
    float4 value = float4(0.0f);
    for (int s = 0; s < NSG; s++) {
      const float share = metal::precise::exp(found[s * H + h].x - largest);
      total += share * found[s * H + h].y;
      value += share * ((const threadgroup float4*)(tiles + s * TILE))[i];
    }
    partial_quads[out_at + first * QUADS + i] = value;
    if (i % QUADS == 0) tops_pairs[long(q_head + h) * items + item] = float2(largest, total);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
