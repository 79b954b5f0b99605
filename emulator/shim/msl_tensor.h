// <metal_tensor> and mpp::tensor_ops::matmul2d of Metal 4, the part that quantised GEMMs use.
// Two-dimensional; scopes are one simdgroup or the whole threadgroup. Extent 0 is the innermost dimension, as
// in Metal. The check build has the products as declarations: to which address spaces tensors point.
#pragma once

#include "msl_simdgroup_matrix.h"

#ifdef MSL_CHECK
#define MSL_MISUSE(message) (void)0
#else
#define MSL_MISUSE(message) lily::emulator::report_misuse(message)
#endif

namespace metal {

inline constexpr const int dynamic_extent = -1;
template <class I>
inline constexpr const I dynamic_length_v = I(-1);

template <class I, int... E>
struct extents {
  I e[sizeof...(E)];
  constexpr extents() : e{I(E)...} {}
  template <class... X, class = enable_if_t<(sizeof...(X) > 0)>>
  constexpr extents(X... x) : e{I(x)...} {}
  constexpr I extent(int i) const { return e[i]; }
};
template <class I, int Rank>
using dextents = conditional_t<Rank == 1, extents<I, -1>, extents<I, -1, -1>>;

struct tensor_inline {};

// A view of n1 rows of n0 elements.
template <class E, class Extents, class Tag = tensor_inline>
struct tensor {
  using element_type = E;
  E* p;
  int n0, n1;
  long row_stride;

  tensor(E* q, Extents e) : p(q), n0((int)e.extent(0)), n1((int)e.extent(1)), row_stride(n0) {}
  template <class S>
  tensor(E* q, Extents e, array<S, 2> strides)
      : p(q), n0((int)e.extent(0)), n1((int)e.extent(1)), row_stride((long)strides[1]) {
    if (strides[0] != 1) MSL_MISUSE("tensor: the inner stride must be 1");
  }
  // Reaches to the edge and is checked there.
  tensor slice(int o0, int o1) const {
    tensor t = *this;
    t.p += o0 + o1 * row_stride;
    t.n0 = n0 - o0;
    t.n1 = n1 - o1;
    return t;
  }
  // Promises that the tile is inside; over the edge is undefined in Metal, an error here.
  template <int A, int B>
  tensor slice(int o0, int o1) const {
    tensor t = slice(o0, o1);
    if (A > t.n0 || B > t.n1) MSL_MISUSE("tensor: a slice of static size reaches over the edge");
    if (A >= 0) t.n0 = A;
    if (B >= 0) t.n1 = B;
    return t;
  }
};

struct execution_thread {
  static constexpr const int simdgroups = 0;
};
template <int N>
struct execution_simdgroups {
  static constexpr const int simdgroups = N;
};
using execution_simdgroup = execution_simdgroups<1>;

}  // namespace metal

namespace mpp {
namespace tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  constexpr matmul2d_descriptor(int m_, int n_, int k_ = metal::dynamic_extent, bool left = false,
                                bool right = false, bool relaxed = false, mode mode_ = mode::multiply)
      : m(m_),
        n(n_),
        k(k_),
        transpose_left(left),
        transpose_right(right),
        relaxed_precision(relaxed),
        matmul_mode(mode_) {}
#ifdef MSL_CHECK
  // C++ for OpenCL has no template arguments of class type.
  constexpr operator int() const { return 0; }
#endif
};

#ifdef MSL_CHECK

template <class T>
struct cooperative_tensor {
  uint16_t get_capacity() const;
  bool is_valid_element(int i) const;
  metal::array<int, 2> get_multidimensional_index(int i) const;
  thread T& operator[](int i);
  template <class X>
  void load(const X& t);
  template <class X>
  void store(const X& t) const;
};

template <int D, class Scope>
struct matmul2d {
  template <class A, class B, class C>
  cooperative_tensor<A> get_left_input_cooperative_tensor() const;
  template <class A, class B, class C>
  cooperative_tensor<B> get_right_input_cooperative_tensor() const;
  template <class A, class B, class C>
  cooperative_tensor<C> get_destination_cooperative_tensor() const;
  template <class A, class B, class C>
  void run(const A& a, const B& b, C& c) const;
};

#endif

}  // namespace tensor_ops
}  // namespace mpp

#undef MSL_MISUSE

#ifndef MSL_CHECK
#include "msl_matmul2d.h"
#endif
