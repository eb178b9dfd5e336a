// Matrices of 8x8 numbers that a simdgroup multiplies at once. A lane holds two numbers: in row
// matrix_row, in column matrix_column and in the next one. Metal leaves open where they lie; MLX's
// own kernels rely on these places, too.
inline int matrix_row(int lane) {
  return lane / 16 * 4 + lane / 2 % 4;
}
inline int matrix_column(int lane) {
  return lane / 8 % 2 * 4 + lane % 2 * 2;
}

// sum += a * b
inline void multiply_add(thread float2& sum, float2 a, float2 b) {
  simdgroup_float8x8 left, right, total;
  left.thread_elements()[0] = a.x;
  left.thread_elements()[1] = a.y;
  right.thread_elements()[0] = b.x;
  right.thread_elements()[1] = b.y;
  total.thread_elements()[0] = sum.x;
  total.thread_elements()[1] = sum.y;
  simdgroup_multiply_accumulate(total, left, right, total);
  sum = float2(total.thread_elements()[0], total.thread_elements()[1]);
}

// Over the lanes that hold numbers of the same row; each of them gets the result.
inline float row_max(float x) {
  x = metal::max(x, simd_shuffle_xor(x, ushort(1)));
  return metal::max(x, simd_shuffle_xor(x, ushort(8)));
}
inline float row_sum(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  return x + simd_shuffle_xor(x, ushort(8));
}
