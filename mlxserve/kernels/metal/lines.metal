// What all threads of a threadgroup copy together to its memory.

// LINES lines of FILLED vectors, `step` vectors apart in `from`, and zeros up to VECTORS; only
// zeros in place of lines outside begin .. end, which aren't read. In `to` a line has a vector more, so
// that the same place of successive lines lies in different banks.
template <int LINES, int FILLED, int VECTORS, int THREADS>
inline void stage_lines(
    threadgroup uint4* to, const device uint4* from, int step, int begin, int end, int thread_id) {
  UNROLL for (int n = 0; n < (LINES * VECTORS + THREADS - 1) / THREADS; n++) {
    const int i = n * THREADS + thread_id;
    const int line = i / VECTORS;
    const int at = i % VECTORS;
    if (LINES * VECTORS % THREADS == 0 || line < LINES)
      to[line * (VECTORS + 1) + at] =
          line >= begin && line < end && at < FILLED ? from[line * step + at] : uint4(0u);
  }
}

// N scales, each in a word with its bias; zeros outside begin .. end.
template <int N, int THREADS>
inline void stage_affines(
    threadgroup uint* to, const device ushort* scales, const device ushort* biases, int begin,
    int end, int thread_id) {
  for (int i = thread_id; i < N; i += THREADS)
    to[i] = i >= begin && i < end ? uint(scales[i]) | uint(biases[i]) << 16 : 0u;
}
