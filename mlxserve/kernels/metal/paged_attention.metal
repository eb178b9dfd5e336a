// Attention of one new token per row over its pages: a part of the context, for the query heads that
// share a KV head.
//
// A threadgroup takes one item of `work`: up to PAGES pages of one row, for H of the G query heads of a
// KV head. Its simdgroups take tiles of TILE tokens in turn and never wait for each other: a tile's
// keys are copied to threadgroup memory as they lie in the page, front to back, so that every load is
// coalesced whatever the head dim; then a lane takes a token, so that a score needs no sum over lanes
// and a key, once unpacked, serves all heads. The values follow through the same memory; there a lane
// takes channels. What each simdgroup found is merged at the end, in their order.
//
// Tokens that the part doesn't see are never read.
//
// q       [T, Hq, D]           hot_k, hot_v    [hot pages * 64, Hk, D]
// how     scale, softcap       pool_k, pool_v  [pages, Hk, 64, D], all in T
// work    [items, 4 + PAGES]: token of q; begin and end of what it sees, in tokens from the start of
//         the part's first page; pages of the part that are sealed, the first ones; ids of all
// partial [items, Hq, D]       sums of p * v, where p = exp(score - largest)
// tops    [Hq, items, 2]       largest score, sum of p
constexpr int PAGE = 64;
constexpr int WORDS = D / 2;       // of a token; a word holds two numbers
constexpr int VECTORS = D / 8;     // of a token; a vector holds four words
constexpr int LINE = VECTORS | 1;  // odd, so that lanes with a token each read from different banks
constexpr int PARTS = 32 / TILE;   // lanes that share a token's score
constexpr int PAIRS = (WORDS + 31) / 32;  // words of a value per lane
constexpr int TILES = PAGE / TILE;
constexpr int COPIES = TILE * VECTORS / 32;  // vectors of a tile per lane
constexpr bool FULL = WORDS % 32 == 0;       // all lanes have words in every turn
constexpr float LOWEST = -1e30f;

threadgroup int task[4 + PAGES];
threadgroup uint4 tiles[NSG * TILE * LINE];
threadgroup float4 queries[H * D / 4];
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
const int sealed = task[3];

const float scale = how[0];
const device uint* q_words = (const device uint*)(q + (long(task[0]) * q_heads + q_head) * D);
for (int i = thread_id; i < H * WORDS; i += NSG * 32)
  ((threadgroup float2*)queries)[i] = unpack<T>(q_words[i]) * scale;
threadgroup_barrier(mem_flags::mem_threadgroup);

threadgroup uint4* tile = tiles + simd_gid * TILE * LINE;
const threadgroup uint* tile_words = (const threadgroup uint*)tile;
const int token = lane % TILE;
const int part = lane / TILE;

float top[H];
float sum[H];
float2 out[H][PAIRS];
UNROLL for (int h = 0; h < H; h++) {
  top[h] = LOWEST;
  sum[h] = 0.0f;
  UNROLL for (int i = 0; i < PAIRS; i++) out[h][i] = float2(0.0f);
}

for (int t = part_begin / TILE + simd_gid; t * TILE < part_end; t += NSG) {
  const int begin = metal::max(t * TILE, part_begin);
  const int count = metal::min(t * TILE + TILE, part_end) - begin;
  const long id = task[4 + t / TILES];
  const bool in_pool = t / TILES < sealed;
  const int step = in_pool ? VECTORS : kv_heads * VECTORS;
  const long at = in_pool ? ((id * kv_heads + kv_head) * PAGE + begin % PAGE) * D
                          : ((id * PAGE + begin % PAGE) * kv_heads + kv_head) * D;
  const device uint4* keys = (const device uint4*)((in_pool ? pool_k : hot_k) + at);
  const device uint4* values = (const device uint4*)((in_pool ? pool_v : hot_v) + at);

  // As many loads for every tile, all of them under way at once; a tile that isn't full loads its
  // last vector again.
  const int last = count * VECTORS - 1;
  UNROLL for (int n = 0; n < COPIES; n++) {
    const int to = n * 32 + lane;
    const int from = metal::min(to, last);
    tile[to / VECTORS * LINE + to % VECTORS] = keys[from / VECTORS * step + from % VECTORS];
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);

  float score[H];
  UNROLL for (int h = 0; h < H; h++) score[h] = 0.0f;
  for (int c = part * (VECTORS / PARTS); c < (part + 1) * (VECTORS / PARTS); c++) {
    const uint4 words = tile[token * LINE + c];
    const float4 a = float4(unpack<T>(words.x), unpack<T>(words.y));
    const float4 b = float4(unpack<T>(words.z), unpack<T>(words.w));
    UNROLL for (int h = 0; h < H; h++) {
      score[h] += metal::dot(a, queries[h * (D / 4) + c * 2]);
      score[h] += metal::dot(b, queries[h * (D / 4) + c * 2 + 1]);
    }
  }
  UNROLL for (int h = 0; h < H; h++) {
    for (int over = TILE; over < 32; over *= 2) score[h] += simd_shuffle_xor(score[h], ushort(over));
    if (SOFTCAP) score[h] = how[1] * metal::precise::tanh(score[h] / how[1]);
    const float seen = token < count ? score[h] : LOWEST;
    const float now = metal::max(top[h], simd_max(seen));
    const float weight = token < count ? metal::precise::exp(seen - now) : 0.0f;
    const float keep = metal::precise::exp(top[h] - now);
    sum[h] = sum[h] * keep + simd_sum(part == 0 ? weight : 0.0f);
    top[h] = now;
    UNROLL for (int i = 0; i < PAIRS; i++) out[h][i] *= keep;
    score[h] = weight;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);

  UNROLL for (int n = 0; n < COPIES; n++) {
    const int to = n * 32 + lane;
    const int from = metal::min(to, last);
    tile[to / VECTORS * LINE + to % VECTORS] = values[from / VECTORS * step + from % VECTORS];
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);

  for (int j = 0; j < count; j++) {
    float weight[H];
    UNROLL for (int h = 0; h < H; h++) weight[h] = simd_broadcast(score[h], ushort(j));
    UNROLL for (int i = 0; i < PAIRS; i++) {
      if (FULL || lane + i * 32 < WORDS) {
        const float2 value = unpack<T>(tile_words[j * LINE * 4 + lane + i * 32]);
        UNROLL for (int h = 0; h < H; h++) out[h][i] += weight[h] * value;
      }
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Each simdgroup's tile now takes what it found.
UNROLL for (int h = 0; h < H; h++) {
  if (lane == 0) found[simd_gid * H + h] = float2(top[h], sum[h]);
  UNROLL for (int i = 0; i < PAIRS; i++)
    if (FULL || lane + i * 32 < WORDS) ((threadgroup float2*)tile)[h * WORDS + lane + i * 32] = out[h][i];
}
threadgroup_barrier(mem_flags::mem_threadgroup);

device float2* partial_pairs = (device float2*)partial;
device float2* tops_pairs = (device float2*)tops;
const int items = int(threadgroups_per_grid.x);
const long out_at = (long(item) * q_heads + q_head) * WORDS;
for (int i = thread_id; i < H * WORDS; i += NSG * 32) {
  const int h = i / WORDS;
  float largest = LOWEST;
  for (int s = 0; s < NSG; s++) largest = metal::max(largest, found[s * H + h].x);
  float total = 0.0f;
  float2 value = float2(0.0f);
  for (int s = 0; s < NSG; s++) {
    const float share = metal::precise::exp(found[s * H + h].x - largest);
    total += share * found[s * H + h].y;
    value += share * ((const threadgroup float2*)(tiles + s * TILE * LINE))[i];
  }
  partial_pairs[out_at + i] = value;
  if (i % WORDS == 0) tops_pairs[long(q_head + h) * items + item] = float2(largest, total);
}
