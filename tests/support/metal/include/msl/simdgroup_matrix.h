// 8x8 matrices that a simdgroup holds, two elements in each lane.
#pragma once
#include "msl/simdgroup.h"

namespace metal {

template <typename T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "a simdgroup matrix is 8x8");
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  MSL_INLINE explicit simdgroup_matrix(T diagonal);
  MSL_INLINE vec<T, 2>& thread_elements() { return elements; }
  MSL_INLINE const vec<T, 2>& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

// Where a lane's first element lies; the second is right of it. Metal leaves it open. This is what
// Apple's GPUs do, as MLX's own kernels rely on (BaseMMAFrag::get_coord in steel/gemm/mma.h).
struct msl_place {
  uint row, column;
};
MSL_INLINE msl_place msl_place_of(uint lane) {
  const uint quad = lane / 4;
  return {(quad & 4) + (lane / 2) % 4, (quad & 2) * 2 + (lane % 2) * 2};
}
MSL_INLINE uint msl_lane_at(uint row, uint column) {
  return ((row & 4) | ((column >> 2) << 1)) * 4 + (row & 3) * 2 + ((column >> 1) & 1);
}

template <typename T, int Rows, int Columns>
MSL_INLINE simdgroup_matrix<T, Rows, Columns>::simdgroup_matrix(T diagonal) {
  const msl_place place = msl_place_of(msl_lane());
  for (uint k = 0; k < 2; k++) elements.d[k] = place.row == place.column + k ? diagonal : T(0);
}
template <typename T, int Rows, int Columns>
MSL_INLINE simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T x) {
  simdgroup_matrix<T, Rows, Columns> matrix;
  matrix.elements = vec<T, 2>(x);
  return matrix;
}

template <typename T>
MSL_INLINE void msl_require_all_lanes(const msl_lanes<T>& lanes, const char* name, msl_site site) {
  if (lanes.values.active != 0xffffffffu) msl_error("partial-simdgroup", name, site);
}
// All lanes must name the same memory.
template <typename P>
MSL_INLINE void msl_meet_at(P* pointer, const char* name, msl_site site) {
  const auto lanes = msl_gather(name, pointer, site);
  msl_require_all_lanes(lanes, name, site);
  if (lanes[__builtin_ctz(lanes.values.active)] != pointer)
    msl_error("simd-argument", "the pointers of the lanes differ", site);
}
MSL_INLINE ulong msl_index(uint row, uint column, ulong stride, ulong2 origin, bool transpose) {
  return transpose ? (origin.y + column) * stride + origin.x + row
                   : (origin.y + row) * stride + origin.x + column;
}

template <typename T>
MSL_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& matrix, const T* source, ulong stride = 8,
                               ulong2 origin = ulong2(0ul), bool transpose = false, MSL_SITE) {
  msl_meet_at(source, "simdgroup_load", site);
  const msl_place place = msl_place_of(msl_lane());
  for (uint k = 0; k < 2; k++)
    matrix.elements.d[k] =
        source[msl_index(place.row, place.column + k, stride, origin, transpose)];
}
template <typename T>
MSL_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8>& matrix, T* target,
                                ulong stride = 8, ulong2 origin = ulong2(0ul),
                                bool transpose = false, MSL_SITE) {
  msl_meet_at(target, "simdgroup_store", site);
  const msl_place place = msl_place_of(msl_lane());
  for (uint k = 0; k < 2; k++)
    target[msl_index(place.row, place.column + k, stride, origin, transpose)] =
        matrix.elements.d[k];
}

// d = a * b + c, summed in float.
template <typename D, typename A, typename B, typename C>
MSL_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                              const simdgroup_matrix<A, 8, 8>& a,
                                              const simdgroup_matrix<B, 8, 8>& b,
                                              const simdgroup_matrix<C, 8, 8>& c, MSL_SITE) {
  struct Pairs {
    A a[2];
    B b[2];
  };
  const char* name = "simdgroup_multiply_accumulate";
  const Pairs own = {{a.elements.d[0], a.elements.d[1]}, {b.elements.d[0], b.elements.d[1]}};
  const auto lanes = msl_gather(name, own, site);
  msl_require_all_lanes(lanes, name, site);
  const msl_place place = msl_place_of(lanes.lane());
  float sum[2] = {float(c.elements.d[0]), float(c.elements.d[1])};
  for (uint k = 0; k < 8; k++) {
    const float left = float(lanes[msl_lane_at(place.row, k)].a[k & 1]);
    const Pairs right = lanes[msl_lane_at(k, place.column)];
    for (uint i = 0; i < 2; i++) sum[i] += left * float(right.b[i]);
  }
  for (uint i = 0; i < 2; i++) d.elements.d[i] = D(sum[i]);
}
template <typename D, typename A, typename B>
MSL_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                   const simdgroup_matrix<B, 8, 8>& b, MSL_SITE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)), site);
}

}  // namespace metal
