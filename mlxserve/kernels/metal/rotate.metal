// Each head of q and k, or with NORMS its RMS norm, turned: pair (i, i + DIM / 2) by position /
// periods[i] radians, times gain.
//
// A simdgroup takes a head of a token, and a lane two neighbouring pairs of it in each of ROUNDS.
//
// q, q_out [tokens, Q_HEADS, DIM]   k, k_out [tokens, K_HEADS, DIM]   q_norm, k_norm [DIM]   all in T
// positions [tokens]   periods [DIM / 2]   numbers: gain, eps
constexpr int HALF = DIM / 2;

const int lane = int(thread_index_in_simdgroup);
const int index = int(thread_position_in_grid.x) / 32;
const int token = int(thread_position_in_grid.y);
const bool is_query = index < Q_HEADS;
const int head = is_query ? index : index - Q_HEADS;
if (head < (is_query ? Q_HEADS : K_HEADS)) {
  const device T* from =
      is_query ? q + (long(token) * Q_HEADS + head) * DIM : k + (long(token) * K_HEADS + head) * DIM;
  device T* to = is_query ? q_out + (long(token) * Q_HEADS + head) * DIM
                          : k_out + (long(token) * K_HEADS + head) * DIM;

  float2 low[ROUNDS];
  float2 high[ROUNDS];
  float squares = 0.0f;
  UNROLL for (int r = 0; r < ROUNDS; r++) {
    const int i = (r * 32 + lane) * 2;
    const bool inside = i < HALF;
    low[r] = inside ? unpack<T>(((const device uint*)from)[i / 2]) : float2(0.0f);
    high[r] = inside ? unpack<T>(((const device uint*)from)[(HALF + i) / 2]) : float2(0.0f);
    squares += low[r].x * low[r].x + low[r].y * low[r].y;
    squares += high[r].x * high[r].x + high[r].y * high[r].y;
  }
  float scale = numbers[0];
  if (NORMS) scale *= metal::precise::rsqrt(simd_sum(squares) / float(DIM) + numbers[1]);

  UNROLL for (int r = 0; r < ROUNDS; r++) {
    const int i = (r * 32 + lane) * 2;
    if (i < HALF) {
      float2 a = low[r] * scale;
      float2 b = high[r] * scale;
      if (NORMS) {
        const device uint* weight = (const device uint*)(is_query ? q_norm : k_norm);
        a *= unpack<T>(weight[i / 2]);
        b *= unpack<T>(weight[(HALF + i) / 2]);
      }
      const float2 first = cos_sin(positions[token], periods[i]);
      const float2 second = cos_sin(positions[token], periods[i + 1]);
      const float2 cosine = float2(first.x, second.x);
      const float2 sine = float2(first.y, second.y);
      ((device uint*)to)[i / 2] = pack<T>(a * cosine - b * sine);
      ((device uint*)to)[(HALF + i) / 2] = pack<T>(b * cosine + a * sine);
    }
  }
}
