// Attention of rows of several tokens over their pages: a block of queries against what they see.
//
// The G query heads of a KV head are folded into the rows of queries: row i of a chunk is its token
// i / G, head i % G. A threadgroup takes one item of `work`, up to ROWS such rows, and walks the
// pages in ascending order, so that each key and value is read once for all of them. A page's keys,
// and then its values, are copied to threadgroup memory, codes as they are; a simdgroup multiplies
// eight rows with them in float32, and keeps the rows' sums in registers. Codes are unpacked to
// float32 as a matrix takes them, and never rounded to 16 bits.
//
// Where a head has more channels than registers hold sums, two simdgroups share eight rows: each
// takes half of the channels, and they add up their shares of the scores.
//
// Every page adds its tokens in the same order, and what a query doesn't see adds exact zeros. So a
// query's result doesn't depend on the rows beside it, nor on where its chunk begins.
//
// Tokens before the first query's window and after the last query aren't read, but in packed keys.
//
// q       [T, Hq, D]           hot_k, hot_v  [hot pages * 64, Hk, D], in T
// k, v    [pages, Hk, 64, D], in T; or where KB, VB are less than 16, codes:
// k       [pages, Hk, D, 64 codes of KB bits]   k_scales, k_biases [pages, Hk, D]
// v       [pages, Hk, 64, GROUPS * 32 codes of VB bits]
//         v_scales, v_biases [pages, Hk, 64, GROUPS]
// rows    [R, 8]: token of q, tokens, position, window, first page, sealed pages, where in pages,
//         token of out
// work    [items, 2]: row, first of its rows of queries
// pages   page ids of all rows
// how     scale, softcap       sinks [Hq]: read only if SINKS
// out     [tokens of all rows, Hq, D]
constexpr int PAGE = 64;
constexpr int MATRICES = PAGE / 8;  // of a page's tokens
constexpr int THREADS = 32 * NSG;
constexpr int SHARES = 8 * NSG / ROWS;  // simdgroups that share rows
constexpr int CHANNELS = D / SHARES;    // of a simdgroup
constexpr int PAIRS = (CHANNELS + 15) / 16;  // of matrices that take these
constexpr int VECTORS = D / 8;               // of a token; a vector is 16 bytes
constexpr int WIDTH = PAIRS * SHARES * 2;    // vectors of a line, with zeros behind the token's
constexpr int LINE = WIDTH + 1;
constexpr int GROUPS = (D + 31) / 32;         // of a token's packed values
constexpr int KEY_VECTORS = PAGE * KB / 128;  // of a channel's codes
constexpr int VALUE_VECTORS = GROUPS * 32 * VB / 128;  // of a token's codes
constexpr int PLAIN_TILE = ROWS * LINE;                // a tile holds as many tokens as rows
constexpr int KEYS_TILE = KB == 16 ? 0 : WIDTH * 8 * (KEY_VECTORS + 1);
constexpr int VALUES_TILE = VB == 16 ? 0 : PAGE * (VALUE_VECTORS + 1);
constexpr int SCORES_TILE = SHARES == 1 ? 0 : THREADS * MATRICES / 2;
constexpr int CODES_TILE = KEYS_TILE > VALUES_TILE ? KEYS_TILE : VALUES_TILE;
constexpr int OTHER_TILE = PLAIN_TILE > SCORES_TILE ? PLAIN_TILE : SCORES_TILE;
constexpr int TILE = CODES_TILE > OTHER_TILE ? CODES_TILE : OTHER_TILE;
constexpr int AFFINES = KB == 16 ? 1 : VB == 16 ? WIDTH * 8 : PAGE * GROUPS;
constexpr float LOWEST = -1e30f;

threadgroup uint4 tile[TILE];
threadgroup uint affines[AFFINES];

const int lane = int(thread_index_in_simdgroup);
const int simd_gid = int(simdgroup_index_in_threadgroup);
const int thread_id = simd_gid * 32 + lane;
const int kv_head = int(threadgroup_position_in_grid.y);
const int kv_heads = int(threadgroups_per_grid.y);
const int q_heads = kv_heads * G;
const int matrix_line = matrix_row(lane);
const int column = matrix_column(lane);

const int2 item = ((const device int2*)work)[threadgroup_position_in_grid.x];
const int4 row = ((const device int4*)rows)[item.x * 2];
const int4 row_pages = ((const device int4*)rows)[item.x * 2 + 1];
const int start = row.z;
const int window = row.w;
const int first_page = row_pages.x;
const int sealed = row_pages.y;
const int pages_at = row_pages.z;

// What the block's queries see, and this simdgroup's eight rows. The last block may lack some:
// those have zeros for queries, and nobody takes what comes out.
const int oldest = first_page * PAGE;
const int count = metal::min(row.y * G - item.y, ROWS);
const int low = metal::max(start + item.y / G - window + 1, oldest);
const int last = start + (item.y + count - 1) / G;
const int own = simd_gid / SHARES * 8;
const int own_low = metal::max(start + (item.y + own) / G - window + 1, oldest);
const int own_last = own < count ? start + (item.y + metal::min(own + 8, count) - 1) / G : -1;
const int position = start + (item.y + own + matrix_line) / G;
const int position_low = position - window + 1;

for (int i = thread_id; i < ROWS * WIDTH; i += THREADS) {
  const int folded = item.y + i / WIDTH;
  const long from = (long(row.x + folded / G) * q_heads + kv_head * G + folded % G) * VECTORS;
  tile[i / WIDTH * LINE + i % WIDTH] = i / WIDTH < count && i % WIDTH < VECTORS
      ? ((const device uint4*)q)[from + i % WIDTH]
      : uint4(0u);
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// Of the simdgroup's channels, a lane takes two pairs of each 16: the first numbers of its pairs go
// into one matrix, the second ones into another. So one word of a key serves two matrices.
const int channel = simd_gid % SHARES * CHANNELS;
const threadgroup uint* tile_words = (const threadgroup uint*)tile;
uint2 query[PAIRS];
UNROLL for (int c = 0; c < PAIRS; c++) {
  const int at = (own + matrix_line) * LINE * 4 + channel / 2 + c * 8 + column;
  query[c] = uint2(tile_words[at], tile_words[at + 1]);
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const float scale = how[0];
float top = LOWEST;  // of the lane's row: the largest score
float sum = 0.0f;    // and, of this lane's tokens, the sum of p = exp(score - top)
float2 out_sums[CHANNELS / 8];
UNROLL for (int c = 0; c < CHANNELS / 8; c++) out_sums[c] = float2(0.0f);
if (SINKS) {
  top = float(sinks[kv_head * G + (item.y + own + matrix_line) % G]);
  sum = column == 0 ? 1.0f : 0.0f;
}

for (int page = low / PAGE; page <= last / PAGE; page++) {
  const long id = pages[pages_at + page - first_page];
  const bool in_pool = page - first_page < sealed;
  const int begin = metal::max(low - page * PAGE, 0);
  const int end = metal::min(last + 1 - page * PAGE, PAGE);
  const bool attends = own_low < (page + 1) * PAGE && own_last >= page * PAGE;
  const long pool_at = id * kv_heads + kv_head;
  const long plain_at = in_pool ? pool_at * PAGE : id * PAGE * kv_heads + kv_head;
  const int step = in_pool ? VECTORS : kv_heads * VECTORS;

  float2 score[MATRICES];
  UNROLL for (int t = 0; t < MATRICES; t++) score[t] = float2(0.0f);
  if (KB < 16 && in_pool) {
    const device uint4* keys = (const device uint4*)k + pool_at * (D * KEY_VECTORS);
    stage_lines<WIDTH * 8, KEY_VECTORS, KEY_VECTORS, THREADS>(
        tile, keys, KEY_VECTORS, 0, D, thread_id);
    const device ushort* scales = (const device ushort*)k_scales + pool_at * D;
    const device ushort* biases = (const device ushort*)k_biases + pool_at * D;
    stage_affines<WIDTH * 8, THREADS>(affines, scales, biases, 0, D, thread_id);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (attends) {
      UNROLL for (int c = 0; c < PAIRS; c++) {
        const float2 x = unpack<T>(query[c].x);
        const float2 y = unpack<T>(query[c].y);
        const int at = channel + c * 16 + matrix_line * 2;
        const threadgroup uint4* line = tile + at * (KEY_VECTORS + 1);
        const float2 first_by = unpack<half>(affines[at]);
        const float2 second_by = unpack<half>(affines[at + 1]);
        UNROLL for (int t = 0; t < MATRICES; t++) {
          const int two = t * 4 + column / 2;
          const float2 first = two_codes<KB>(line, two) * first_by.x + first_by.y;
          const float2 second =
              two_codes<KB>(line + KEY_VECTORS + 1, two) * second_by.x + second_by.y;
          multiply_add(score[t], float2(x.x, y.x), first);
          multiply_add(score[t], float2(x.y, y.y), second);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    const device uint4* keys =
        (in_pool ? (const device uint4*)k : (const device uint4*)hot_k) + plain_at * VECTORS;
    UNROLL for (int t = 0; t < MATRICES; t += ROWS / 8) {
      stage_lines<ROWS, VECTORS, WIDTH, THREADS>(
          tile, keys + t * 8 * step, step, begin - t * 8, end - t * 8, thread_id);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (attends) {
        UNROLL for (int c = 0; c < PAIRS; c++) {
          const float2 x = unpack<T>(query[c].x);
          const float2 y = unpack<T>(query[c].y);
          UNROLL for (int i = 0; i < ROWS / 8; i++) {
            const int at = (i * 8 + column) * LINE * 4 + channel / 2 + c * 8 + matrix_line;
            const float2 key = unpack<T>(tile_words[at]);
            const float2 next = unpack<T>(tile_words[at + LINE * 4]);
            multiply_add(score[t + i], float2(x.x, y.x), float2(key.x, next.x));
            multiply_add(score[t + i], float2(x.y, y.y), float2(key.y, next.y));
          }
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }

  if (SHARES == 2) {
    threadgroup float2* shares = (threadgroup float2*)tile + thread_id;
    const threadgroup float2* others = (const threadgroup float2*)tile + (thread_id ^ 32);
    UNROLL for (int t = 0; t < MATRICES; t++) shares[t * THREADS] = score[t];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int t = 0; t < MATRICES; t++) score[t] += others[t * THREADS];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  if (attends) {
    float now = top;
    UNROLL for (int t = 0; t < MATRICES; t++) {
      const int token = page * PAGE + t * 8 + column;
      score[t] *= scale;
      if (SOFTCAP) score[t] = how[1] * metal::precise::tanh(score[t] / how[1]);
      if (token < position_low || token > position) score[t].x = LOWEST;
      if (token + 1 < position_low || token + 1 > position) score[t].y = LOWEST;
      now = metal::max(now, metal::max(score[t].x, score[t].y));
    }
    now = row_max(now);
    const float keep = metal::precise::exp(top - now);
    top = now;
    sum *= keep;
    // Beside a score exp(LOWEST - now) is 0. A row without one so far gets numbers that its first
    // score makes 0: keep is, then.
    UNROLL for (int t = 0; t < MATRICES; t++) {
      score[t] = metal::precise::exp(score[t] - now);
      sum += score[t].x + score[t].y;
    }
    UNROLL for (int c = 0; c < CHANNELS / 8; c++) out_sums[c] *= keep;
  }

  if (VB < 16 && in_pool) {
    const device uint4* values = (const device uint4*)v + pool_at * (PAGE * VALUE_VECTORS);
    stage_lines<PAGE, VALUE_VECTORS, VALUE_VECTORS, THREADS>(
        tile, values, VALUE_VECTORS, begin, end, thread_id);
    const device ushort* scales = (const device ushort*)v_scales + pool_at * (PAGE * GROUPS);
    const device ushort* biases = (const device ushort*)v_biases + pool_at * (PAGE * GROUPS);
    stage_affines<PAGE * GROUPS, THREADS>(
        affines, scales, biases, begin * GROUPS, end * GROUPS, thread_id);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (attends) {
      UNROLL for (int t = 0; t < MATRICES; t++) {
        const int token = t * 8 + matrix_line;
        const threadgroup uint4* line = tile + token * (VALUE_VECTORS + 1);
        UNROLL for (int c = 0; c < CHANNELS / 8; c++) {
          const int at = channel + c * 8 + column;
          const float2 by = unpack<half>(affines[token * GROUPS + at / 32]);
          multiply_add(out_sums[c], score[t], two_codes<VB>(line, at / 2) * by.x + by.y);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    const device uint4* values =
        (in_pool ? (const device uint4*)v : (const device uint4*)hot_v) + plain_at * VECTORS;
    UNROLL for (int t = 0; t < MATRICES; t += ROWS / 8) {
      stage_lines<ROWS, VECTORS, WIDTH, THREADS>(
          tile, values + t * 8 * step, step, begin - t * 8, end - t * 8, thread_id);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (attends) {
        UNROLL for (int i = 0; i < ROWS / 8; i++) {
          const int at = (i * 8 + matrix_line) * LINE * 4 + (channel + column) / 2;
          UNROLL for (int c = 0; c < CHANNELS / 8; c++)
            multiply_add(out_sums[c], score[t + i], unpack<T>(tile_words[at + c * 4]));
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}

sum = row_sum(sum);
threadgroup T* out_line = (threadgroup T*)(tile + (own + matrix_line) * LINE) + channel + column;
UNROLL for (int c = 0; c < CHANNELS / 8; c++) {
  out_line[c * 8] = T(out_sums[c].x / sum);
  out_line[c * 8 + 1] = T(out_sums[c].y / sum);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int i = thread_id; i < count * VECTORS; i += THREADS) {
  const int folded = item.y + i / VECTORS;
  const long to = (long(row_pages.w + folded / G) * q_heads + kv_head * G + folded % G) * VECTORS;
  ((device uint4*)out)[to + i % VECTORS] = tile[i / VECTORS * LINE + i % VECTORS];
}
