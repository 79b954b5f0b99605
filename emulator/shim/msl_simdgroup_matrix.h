// simdgroup_matrix: 8x8 of half, bfloat or float, two elements a lane. Multiplication is a collective in
// float.
//
// Metal does not say which lane holds which elements. The map here is the one of Apple's GPUs, and
// MSL_OTHER_LANE_MAP chooses another one, so that kernels which rely on a map can be found out.
#pragma once

#include "msl_simd.h"

namespace metal {

template <class T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "simdgroup_matrix: only 8x8");
  vec<T, 2> e;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal);
  vec<T, 2> thread& thread_elements() thread { return e; }
  const vec<T, 2> thread& thread_elements() const thread { return e; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Rows, int Columns>
inline simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Rows, Columns> m;
  m.e = vec<T, 2>(value);
  return m;
}

#ifndef MSL_CHECK

namespace simd {

inline int matrix_row(int lane) {
#ifdef MSL_OTHER_LANE_MAP
  return lane >> 2;
#else
  return ((lane >> 2) & 4) | ((lane >> 1) & 3);
#endif
}
inline int matrix_column(int lane, int element) {
#ifdef MSL_OTHER_LANE_MAP
  return (lane & 3) * 2 + element;
#else
  return (((lane >> 2) & 2) | (lane & 1)) * 2 + element;
#endif
}

struct MatrixOperands {
  void* d;
  const void *a, *b, *c;
};

template <class D, class A, class B, class C>
MSL_QUIET void multiply_accumulate(Simdgroup& s, unsigned parity) {
  float a[8][8], b[8][8], d[8][8];
  const MatrixOperands* operands = slots<MatrixOperands>(s, parity);
  for (int lane = 0; lane < 32; lane++) {
    const int row = matrix_row(lane), column = matrix_column(lane, 0);
    for (int k = 0; k < 2; k++) {
      a[row][column + k] = float(((const A*)operands[lane].a)[k]);
      b[row][column + k] = float(((const B*)operands[lane].b)[k]);
      d[row][column + k] = float(((const C*)operands[lane].c)[k]);
    }
  }
  for (int row = 0; row < 8; row++)
    for (int k = 0; k < 8; k++)
      for (int column = 0; column < 8; column++) d[row][column] += a[row][k] * b[k][column];
  for (int lane = 0; lane < 32; lane++) {
    const int row = matrix_row(lane), column = matrix_column(lane, 0);
    for (int k = 0; k < 2; k++) ((D*)operands[lane].d)[k] = D(d[row][column + k]);
  }
}

}  // namespace simd

template <class T, int Rows, int Columns>
simdgroup_matrix<T, Rows, Columns>::simdgroup_matrix(T diagonal) {
  const int lane = (int)simd::lane();
  for (int k = 0; k < 2; k++)
    e.v[k] = simd::matrix_row(lane) == simd::matrix_column(lane, k) ? diagonal : T(0);
}

// Loads and stores are traced element by element, by the lane that owns the element. They are not collectives
// here, so a diverged one shows only at the next multiplication.
template <class T, class U>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const U* p, ulong elements_per_row = 8,
                           ulong2 origin = ulong2(0), bool transpose = false) {
  p += origin.y * elements_per_row + origin.x;
  const int lane = (int)simd::lane();
  const ulong row = (ulong)simd::matrix_row(lane);
  for (int k = 0; k < 2; k++) {
    const ulong column = (ulong)simd::matrix_column(lane, k);
    m.e.v[k] = T(transpose ? p[column * elements_per_row + row] : p[row * elements_per_row + column]);
  }
}
template <class T, class U>
inline void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, U* p, ulong elements_per_row = 8,
                            ulong2 origin = ulong2(0), bool transpose = false) {
  p += origin.y * elements_per_row + origin.x;
  const int lane = (int)simd::lane();
  const ulong row = (ulong)simd::matrix_row(lane);
  for (int k = 0; k < 2; k++) {
    const ulong column = (ulong)simd::matrix_column(lane, k);
    p[transpose ? column * elements_per_row + row : row * elements_per_row + column] = U(m.e.v[k]);
  }
}
template <class D, class A, class B, class C>
MSL_CALL void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                            const simdgroup_matrix<B, 8, 8>& b,
                                            const simdgroup_matrix<C, 8, 8>& c) {
  if (lily::emulator::current_thread->simdgroup->full != ~0u)
    lily::emulator::report_misuse("simdgroup_multiply_accumulate in a simdgroup of less than 32 threads");
  simd::deposit(simd::MatrixOperands{&d.e, &a.e, &b.e, &c.e});
  lily::emulator::simd_collect(lily::emulator::op_multiply_accumulate, MSL_SITE,
                               &simd::multiply_accumulate<D, A, B, C>);
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                   const simdgroup_matrix<B, 8, 8>& b) {
  const simdgroup_matrix<D, 8, 8> zero = make_filled_simdgroup_matrix<D, 8, 8>(D(0));
  simdgroup_multiply_accumulate(d, a, b, zero);
}

#else

template <class T, int Rows, int Columns>
simdgroup_matrix<T, Rows, Columns>::simdgroup_matrix(T diagonal) {
  e = vec<T, 2>(diagonal);
}
#define MSL_MATRIX_ACCESS(space)                                                                          \
  template <class T, class U>                                                                             \
  void simdgroup_load(simdgroup_matrix<T, 8, 8> thread& m, const space U* p, ulong elements_per_row = 8,  \
                      ulong2 origin = ulong2(0), bool transpose = false);                                 \
  template <class T, class U>                                                                             \
  void simdgroup_store(const simdgroup_matrix<T, 8, 8> thread& m, space U* p, ulong elements_per_row = 8, \
                       ulong2 origin = ulong2(0), bool transpose = false);
MSL_MATRIX_ACCESS(device)
MSL_MATRIX_ACCESS(threadgroup)
#undef MSL_MATRIX_ACCESS
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8> thread& d,
                                   const simdgroup_matrix<A, 8, 8> thread& a,
                                   const simdgroup_matrix<B, 8, 8> thread& b,
                                   const simdgroup_matrix<C, 8, 8> thread& c);
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8> thread& d, const simdgroup_matrix<A, 8, 8> thread& a,
                        const simdgroup_matrix<B, 8, 8> thread& b);
#endif

}  // namespace metal
