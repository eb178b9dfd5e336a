// Where the i-th number of group g lies in a tile of tokens that have WIDTH channels: a group of keys
// is a channel, one of values is 32 channels of a token, ACROSS of which a token has.
template <bool KEYS, int WIDTH, int ACROSS>
inline int place(int g, int i) {
  if (KEYS) return i * WIDTH + g;
  return g / ACROSS * WIDTH + metal::min(g % ACROSS * 32 + i, WIDTH - 1);
}
