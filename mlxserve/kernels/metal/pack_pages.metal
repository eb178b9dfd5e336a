// Full hot pages, token-major in T, to packed ones: the keys or the values of all pages of a launch.
//
// A threadgroup takes a tile of one page and KV head: all tokens of C channels of the keys, or all
// channels of R tokens of the values. Its numbers come through threadgroup memory, so that loads and
// stores are whole lines. A thread finds the scale and bias of a group; then all write codes, word
// after word.
//
// Whether a number is finite is read off its bits, since a compiler for fast arithmetic may assume
// that all are.
//
// hot [n_hot * 64, Hk, D]    ids [n], of hot pages
// keys: codes [n, Hk, D, 64 codes], scales and biases [n, Hk, D]
// values: codes [n, Hk, 64, DP codes], scales and biases [n, Hk, 64, DP / 32]; DP is D up to a
//     multiple of 32, and what fills up a group repeats the last channel
constexpr int PAGE = 64;
constexpr int ROWS = KEYS ? PAGE : R;  // tokens of a tile
constexpr int WIDTH = KEYS ? C : D;    // channels of it
constexpr int TILES = KEYS ? D / C : PAGE / R;
constexpr int GROUP = KEYS ? PAGE : 32;
constexpr int ACROSS = KEYS ? 1 : (D + 31) / 32;  // groups of a token
constexpr int GROUPS = KEYS ? C : R * ACROSS;     // of a tile
constexpr int PER_WORD = 32 / BITS;
constexpr int WORDS = GROUPS * GROUP / PER_WORD;
constexpr uint EXPONENT = IS_HALF ? 0x7c00u : 0x7f80u;
constexpr float TOP = float((1 << BITS) - 1);
constexpr float LARGEST = 65504.0f;

threadgroup uint tile[ROWS * WIDTH / 2];
threadgroup float2 affine[GROUPS];

const int thread_id = int(thread_index_in_threadgroup);
const int part = int(threadgroup_position_in_grid.x);
const int head = int(threadgroup_position_in_grid.y);
const int heads = int(threadgroups_per_grid.y);
const int page = int(threadgroup_position_in_grid.z);

const long first = long(ids[page]) * PAGE + (KEYS ? 0 : part * ROWS);
for (int i = thread_id; i < ROWS * WIDTH / 2; i += THREADS) {
  const long row = (first + i / (WIDTH / 2)) * heads + head;
  tile[i] = ((const device uint*)(hot + row * D + (KEYS ? part * WIDTH : 0)))[i % (WIDTH / 2)];
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const threadgroup ushort* numbers = (const threadgroup ushort*)tile;
const long at = (long(page) * heads + head) * TILES + part;
for (int g = thread_id; g < GROUPS; g += THREADS) {
  float low = 3.0e38f;
  float high = -3.0e38f;
  bool finite = true;
  for (int i = 0; i < GROUP; i++) {
    const uint bits = numbers[place<KEYS, WIDTH, ACROSS>(g, i)];
    const float x = unpack<T>(bits).x;
    finite = finite && (bits & EXPONENT) != EXPONENT;
    low = metal::min(low, x);
    high = metal::max(high, x);
  }
  const half bias = half(metal::clamp(low, -LARGEST, LARGEST));
  const half scale = half(metal::min((high - low) / TOP, LARGEST));
  uint bias_bits = as_type<ushort>(bias);
  if ((bias_bits & 0x7fffu) == 0) bias_bits = 0;  // not -0
  affine[g] = finite ? float2(float(scale), float(bias)) : float2(0.0f);
  scales[at * GROUPS + g] = finite ? scale : half(0.0f);
  biases[at * GROUPS + g] = as_type<half>(ushort(finite ? bias_bits : 0x7e00u));
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int w = thread_id; w < WORDS; w += THREADS) {
  const int g = w / (GROUP / PER_WORD);
  const float2 by = affine[g];
  uint word = 0;
  UNROLL for (int i = 0; i < PER_WORD; i++) {
    const uint bits = numbers[place<KEYS, WIDTH, ACROSS>(g, w % (GROUP / PER_WORD) * PER_WORD + i)];
    const float x = unpack<T>(bits).x;
    const float code = by.x > 0.0f ? metal::clamp(metal::rint((x - by.y) / by.x), 0.0f, TOP) : 0.0f;
    word |= uint(code) << (i * BITS);
  }
  codes[at * WORDS + w] = word;
}
