// The i-th eight codes of packed weights, four in the low bits of each word.
template <int BITS>
inline uint2 eight_codes(const device uint* words, long i);

template <>
inline uint2 eight_codes<8>(const device uint* words, long i) {
  return ((const device uint2*)words)[i];
}

template <>
inline uint2 eight_codes<4>(const device uint* words, long i) {
  const uint word = words[i];
  return uint2(word, word >> 16);
}

// The i-th pair of 16-bit numbers, or the i-th number alone, in a word.
template <int PAIR, typename T>
inline uint word_of(const device T* numbers, long i) {
  if (PAIR == 2) return ((const device uint*)numbers)[i];
  return ((const device ushort*)numbers)[i];
}
