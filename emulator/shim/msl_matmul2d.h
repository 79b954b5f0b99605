// mpp::tensor_ops::matmul2d (msl_tensor.h) as it is executed. Products are computed in float in a fixed
// order, which the hardware does not promise.
#pragma once

#include "msl_tensor.h"

namespace mpp {
namespace tensor_ops {

enum class Role { left, right, destination };

// Which thread owns which element is not defined in Metal. Here it differs by role, so that code which
// assumes a layout fails.
template <class T, int N0, int N1, int S, Role role>
struct cooperative_tensor {
  using element_type = T;
  static constexpr const int capacity = (N0 * N1 + 32 * S - 1) / (32 * S);
  T v[capacity];

  static int flat(int thread_index, int i) {
    if (role == Role::destination) return i * 32 * S + thread_index;
    if (role == Role::left) return thread_index * capacity + i;
    return (i * 32 * S + thread_index) ^ 1;
  }
  static int thread_index() {
    const lily::emulator::Thread& t = *lily::emulator::current_thread;
    return t.simdgroup_index % S * 32 + t.lane;
  }
  uint16_t get_capacity() const { return capacity; }
  bool is_valid_element(int i) const { return flat(thread_index(), i) < N0 * N1; }
  metal::array<int, 2> get_multidimensional_index(int i) const {
    const int f = flat(thread_index(), i);
    return {{f % N0, f / N0}};
  }
  T& operator[](int i) { return v[i]; }
  const T& operator[](int i) const { return v[i]; }
  template <class X>
  void load(const X& t) {
    for (int i = 0; i < capacity; i++) {
      if (!is_valid_element(i)) continue;
      const auto at = get_multidimensional_index(i);
      v[i] = at[0] < t.n0 && at[1] < t.n1 ? T(t.p[at[0] + at[1] * t.row_stride]) : T(0);
    }
  }
  template <class X>
  void store(const X& t) const {
    for (int i = 0; i < capacity; i++) {
      if (!is_valid_element(i)) continue;
      const auto at = get_multidimensional_index(i);
      if (at[0] < t.n0 && at[1] < t.n1) t.p[at[0] + at[1] * t.row_stride] = typename X::element_type(v[i]);
    }
  }
};

template <class X>
inline constexpr const bool is_cooperative = false;
template <class T, int N0, int N1, int S, Role role>
inline constexpr const bool is_cooperative<cooperative_tensor<T, N0, N1, S, role>> = true;

template <matmul2d_descriptor D, class Scope>
struct matmul2d {
  static constexpr const int S = Scope::simdgroups;
  static constexpr const int M = D.m, N = D.n, K = D.k;
  // Asserted by the headers of macOS 26.
  static_assert(M % 16 == 0 || N % 16 == 0, "matmul2d: M or N must be a multiple of 16");
  static_assert(N % 8 == 0, "matmul2d: N must be a multiple of 8");
  static_assert(K < 0 || K % 16 == 0, "matmul2d: K must be dynamic or a multiple of 16");
  static_assert(S > 0, "matmul2d: single-thread scope is not emulated");

  template <class A, class B, class C>
  auto get_left_input_cooperative_tensor() const {
    static_assert(K > 0, "matmul2d: cooperative inputs need a static K");
    return cooperative_tensor<A, D.transpose_left ? M : K, D.transpose_left ? K : M, S, Role::left>{};
  }
  template <class A, class B, class C>
  auto get_right_input_cooperative_tensor() const {
    static_assert(K > 0, "matmul2d: cooperative inputs need a static K");
    return cooperative_tensor<B, D.transpose_right ? K : N, D.transpose_right ? N : K, S, Role::right>{};
  }
  template <class A, class B, class C>
  auto get_destination_cooperative_tensor() const {
    return cooperative_tensor<C, N, M, S, Role::destination>{};
  }

  template <class A, class B, class C>
  MSL_CALL void run(A& a, B& b, C& c) const {
    const Operands mine{(void*)&a, (void*)&b, (void*)&c};
    const lily::emulator::Thread& t = *lily::emulator::current_thread;
    if constexpr (S == 1) {
      if (t.simdgroup->full != ~0u)
        lily::emulator::report_misuse("matmul2d in a simdgroup of less than 32 threads");
      metal::simd::deposit(mine);
      lily::emulator::simd_collect(lily::emulator::op_matmul2d, MSL_SITE, &combine<A, B, C>);
    } else {
      if (t.group->n_simdgroups != (uint32_t)S)
        lily::emulator::report_misuse("matmul2d: the scope is not the whole threadgroup");
      Operands* all = (Operands*)lily::emulator::threadgroup_scratch(sizeof(Operands) * 32 * S);
      all[t.index] = mine;
      lily::emulator::threadgroup_barrier(0, MSL_SITE);
      if (t.index == 0) compute<A, B, C>(all);
      lily::emulator::threadgroup_barrier(0, (const char*)MSL_SITE + 1);
    }
  }
  template <class A, class B, class C>
  METAL_FUNC void run(A&& a, B&& b, C&& c) const {
    A x = a;
    B y = b;
    C z = c;
    run<A, B, C>(x, y, z);
  }

 private:
  struct Operands {
    void *a, *b, *c;
  };

  template <class A, class B, class C>
  MSL_QUIET static void combine(lily::emulator::Simdgroup& s, unsigned parity) {
    compute<A, B, C>(metal::simd::slots<Operands>(s, parity));
  }
  MSL_QUIET static void* member(const Operands& o, Role role) {
    return role == Role::left ? o.a : role == Role::right ? o.b : o.c;
  }

  // n1 rows of n0 elements as floats; zero outside of a tensor.
  template <Role role, class X>
  MSL_QUIET static void gather(const Operands* all, int n0, int n1, float* out) {
    if constexpr (is_cooperative<X>) {
      for (int w = 0; w < 32 * S; w++) {
        const X& x = *(const X*)member(all[w], role);
        for (int i = 0; i < X::capacity; i++)
          if (const int f = X::flat(w, i); f < n0 * n1) out[f] = float(x.v[i]);
      }
    } else {
      const X& x = *(const X*)member(all[0], role);
      for (int r = 0; r < n1; r++) {
        const int inside = r < x.n1 ? (n0 < x.n0 ? n0 : x.n0) : 0;
        if (inside > 0)
          lily::emulator::note_range(x.p + r * x.row_stride, sizeof(*x.p) * (size_t)inside, false);
        for (int c = 0; c < n0; c++) out[r * n0 + c] = c < inside ? float(x.p[c + r * x.row_stride]) : 0.0f;
      }
    }
  }
  template <class X>
  MSL_QUIET static void scatter(const Operands* all, const float* in) {
    if constexpr (is_cooperative<X>) {
      for (int w = 0; w < 32 * S; w++)
        for (int i = 0; i < X::capacity; i++)
          if (const int f = X::flat(w, i); f < M * N) ((X*)all[w].c)->v[i] = typename X::element_type(in[f]);
    } else {
      X& x = *(X*)all[0].c;
      for (int r = 0; r < M && r < x.n1; r++) {
        const int inside = N < x.n0 ? N : x.n0;
        lily::emulator::note_range(x.p + r * x.row_stride, sizeof(*x.p) * (size_t)inside, true);
        for (int c = 0; c < inside; c++) x.p[c + r * x.row_stride] = typename X::element_type(in[r * N + c]);
      }
    }
  }

  // Run by one thread when all of the scope are here.
  template <class A, class B, class C>
  MSL_QUIET static void compute(const Operands* all) {
    int k = K;
    if constexpr (!is_cooperative<A>) {
      const A& a = *(const A*)all[0].a;
      const int extent = D.transpose_left ? a.n1 : a.n0;
      if (K < 0) k = extent;
      if (extent < K)
        lily::emulator::report_misuse("matmul2d: the left tensor's K extent is below the static K");
    }
    float* x = (float*)__builtin_malloc(sizeof(float) * (size_t)(M * k));
    float* y = (float*)__builtin_malloc(sizeof(float) * (size_t)(N * k));
    float* z = (float*)__builtin_malloc(sizeof(float) * M * N);
    gather<Role::left, A>(all, D.transpose_left ? M : k, D.transpose_left ? k : M, x);
    gather<Role::right, B>(all, D.transpose_right ? k : N, D.transpose_right ? N : k, y);
    if (D.matmul_mode == matmul2d_descriptor::mode::multiply_accumulate)
      gather<Role::destination, C>(all, N, M, z);
    else
      for (int i = 0; i < M * N; i++) z[i] = 0.0f;
    for (int i = 0; i < M; i++)
      for (int j = 0; j < N; j++) {
        float sum = 0.0f;
        for (int q = 0; q < k; q++)
          sum += x[D.transpose_left ? q * M + i : i * k + q] * y[D.transpose_right ? j * k + q : q * N + j];
        z[i * N + j] += sum;
      }
    scatter<C>(all, z);
    __builtin_free(x);
    __builtin_free(y);
    __builtin_free(z);
  }
};

}  // namespace tensor_ops
}  // namespace mpp
