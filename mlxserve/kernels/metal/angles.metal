// Cosine and sine of position / period. A float32 quotient would be off by its last place, which at a
// position of 100,000 are 0.004 radians: so it is kept in two parts, and so are the turns of 2 pi that
// are taken off it.
inline float2 cos_sin(int position, float period) {
  const float at = float(position);
  const float inverse = metal::precise::divide(1.0f, period);
  const float rest = metal::fma(-inverse, period, 1.0f) * inverse;
  const float angle = at * inverse;
  const float angle_rest = metal::fma(at, rest, metal::fma(at, inverse, -angle));
  const float turns = metal::rint(angle * 0.15915494f);
  const float reduced = metal::fma(turns, 1.7484555e-7f, metal::fma(turns, -6.2831855f, angle));
  return float2(metal::precise::cos(reduced + angle_rest), metal::precise::sin(reduced + angle_rest));
}
