// sums = stream + y, or with INNER stream + y / rms(y) * inner; normed = sums / rms(sums) * weight.
//
// A threadgroup of NSG simdgroups takes a row, and a thread four neighbours of it in each of ROUNDS.
// All between is float32; the sum is rounded before its norm is taken, since that is what later
// layers see.
//
// y, stream, sums, normed [rows, D]   weight, inner [D]   all in T; eps: a float
threadgroup float partial[2 * NSG];

const int lane = int(thread_index_in_simdgroup);
const int simd_gid = int(simdgroup_index_in_threadgroup);
const int thread_id = simd_gid * 32 + lane;
const int fours = y_shape[1] / 4;  // of a row
const long first = long(threadgroup_position_in_grid.x) * fours;

float4 held[ROUNDS];
float total = 0.0f;
UNROLL for (int r = 0; r < ROUNDS; r++) {
  const int i = r * NSG * 32 + thread_id;
  held[r] = i < fours ? four<T>(y, first + i) : float4(0.0f);
  total += squares(held[r]);
}
if (INNER) {
  total = row_sum<NSG>(total, partial, lane, simd_gid);
  const float scale = metal::precise::rsqrt(total / float(4 * fours) + eps);
  UNROLL for (int r = 0; r < ROUNDS; r++) {
    const int i = r * NSG * 32 + thread_id;
    if (i < fours) held[r] = held[r] * scale * four<T>(inner, i);
  }
}

total = 0.0f;
UNROLL for (int r = 0; r < ROUNDS; r++) {
  const int i = r * NSG * 32 + thread_id;
  if (i < fours) {
    const float4 sum = four<T>(stream, first + i) + held[r];
    put_four<T>(sums, first + i, sum);
    held[r] = float4(unpack<T>(pack<T>(sum.xy)), unpack<T>(pack<T>(sum.zw)));
    total += squares(held[r]);
  }
}
total = row_sum<NSG>(total, partial + NSG, lane, simd_gid);
const float scale = metal::precise::rsqrt(total / float(4 * fours) + eps);
UNROLL for (int r = 0; r < ROUNDS; r++) {
  const int i = r * NSG * 32 + thread_id;
  if (i < fours) put_four<T>(normed, first + i, held[r] * scale * four<T>(weight, i));
}
