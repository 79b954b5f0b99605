// Vectors with swizzles, packed vectors and as_type. Classes, because the compiler's own vector types do not
// take float4(a, b, c, d) in C++.
#pragma once

#include "msl_half.h"
#include "msl_swizzle.h"

namespace metal {

template <class T, int N>
struct vec;

// A view of some components of a vector of N; lives in a union with the vector's storage.
template <class T, int N, int... I>
struct Swizzle {
  T v[N];
  static constexpr const int M = sizeof...(I);
  operator vec<T, M>() const { return vec<T, M>(v[I]...); }
  vec<T, M> get() const { return vec<T, M>(v[I]...); }
  Swizzle& operator=(const vec<T, M>& other) {
    int k = 0;
    ((v[I] = other.v[k++]), ...);
    return *this;
  }
  Swizzle& operator=(const Swizzle& other) { return *this = other.get(); }
#define MSL_ASSIGN(op)                   \
  template <class U>                     \
  Swizzle& operator op##=(const U & u) { \
    vec<T, M> t = *this;                 \
    t op## = u;                          \
    return *this = t;                    \
  }
  MSL_ASSIGN(+)
  MSL_ASSIGN(-)
  MSL_ASSIGN(*)
  MSL_ASSIGN(/)
#undef MSL_ASSIGN
};

template <class T, int N>
struct VectorStorage;

#define MSL_COPY(n)                                  \
  VectorStorage() = default;                         \
  VectorStorage(const VectorStorage& o) {            \
    for (int i = 0; i < n; i++) v[i] = o.v[i];       \
  }                                                  \
  VectorStorage& operator=(const VectorStorage& o) { \
    for (int i = 0; i < n; i++) v[i] = o.v[i];       \
    return *this;                                    \
  }
template <class T>
struct alignas(2 * sizeof(T)) VectorStorage<T, 2> {
  union {
    T v[2];
    struct {
      T x, y;
    };
    struct {
      T r, g;
    };
    MSL_SWIZZLES_2(T)
  };
  MSL_COPY(2)
};
template <class T>
struct alignas(4 * sizeof(T)) VectorStorage<T, 3> {
  union {
    T v[3];
    struct {
      T x, y, z;
    };
    struct {
      T r, g, b;
    };
    MSL_SWIZZLES_3(T)
  };
  MSL_COPY(3)
};
template <class T>
struct alignas(4 * sizeof(T)) VectorStorage<T, 4> {
  union {
    T v[4];
    struct {
      T x, y, z, w;
    };
    struct {
      T r, g, b, a;
    };
    MSL_SWIZZLES_4(T)
  };
  MSL_COPY(4)
};
#undef MSL_COPY

template <class V>
struct is_vec : false_type {};
template <class T, int N>
struct is_vec<vec<T, N>> : true_type {};
template <class V>
struct Components {
  static constexpr const int n = 1;
};
template <class T, int N>
struct Components<vec<T, N>> {
  static constexpr const int n = N;
};

template <class T, int N>
struct vec : VectorStorage<T, N> {
  using VectorStorage<T, N>::v;
  vec() = default;
  vec(const vec&) = default;
  vec& operator=(const vec&) = default;
#ifdef MSL_CHECK
  vec(const __constant vec& o) {
    for (int i = 0; i < N; i++) v[i] = o.v[i];
  }
  vec& operator=(const __constant vec& o) {
    for (int i = 0; i < N; i++) v[i] = o.v[i];
    return *this;
  }
  const __constant T& operator[](int i) const __constant { return v[i]; }
#endif
  template <class S, class = enable_if_t<is_scalar_v<S>>>
  vec(S s) {
    for (int i = 0; i < N; i++) v[i] = T(s);
  }
  template <class U, class = enable_if_t<!is_same_v<U, T>>>
  explicit vec(const vec<U, N>& o) {
    for (int i = 0; i < N; i++) v[i] = T(o.v[i]);
  }
  template <class A, class B, class... Rest>
  vec(const A& a, const B& b, const Rest&... rest) {
    int k = 0;
    put(k, a);
    put(k, b);
    (put(k, rest), ...);
  }
  T& operator[](int i) { return v[i]; }
  const T& operator[](int i) const { return v[i]; }
  vec operator-() const {
    vec r;
    for (int i = 0; i < N; i++) r.v[i] = T(-v[i]);
    return r;
  }
  vec operator~() const {
    vec r;
    for (int i = 0; i < N; i++) r.v[i] = T(~v[i]);
    return r;
  }
#define MSL_ASSIGN(op)               \
  template <class U>                 \
  vec& operator op##=(const U & u) { \
    *this = *this op u;              \
    return *this;                    \
  }
  MSL_ASSIGN(+)
  MSL_ASSIGN(-)
  MSL_ASSIGN(*)
  MSL_ASSIGN(/)
  MSL_ASSIGN(&)
  MSL_ASSIGN(|)
  MSL_ASSIGN(^)
  MSL_ASSIGN(<<)
  MSL_ASSIGN(>>)
#undef MSL_ASSIGN

 private:
  template <class S, class = enable_if_t<is_scalar_v<S>>>
  void put(int thread& k, S s) {
    v[k++] = T(s);
  }
  template <class U, int M>
  void put(int thread& k, const vec<U, M>& s) {
    for (int i = 0; i < M; i++) v[k++] = T(s.v[i]);
  }
  template <class U, int M, int... I>
  void put(int thread& k, const Swizzle<U, M, I...>& s) {
    put(k, s.get());
  }
};

#define MSL_OPERATOR(op)                                                                 \
  template <class T, int N>                                                              \
  inline vec<T, N> operator op(const vec<T, N>& a, const vec<T, N>& b) {                 \
    vec<T, N> r;                                                                         \
    for (int i = 0; i < N; i++) r.v[i] = T(a.v[i] op b.v[i]);                            \
    return r;                                                                            \
  }                                                                                      \
  template <class T, int N, class S, class = enable_if_t<is_scalar_v<S>>>                \
  inline vec<T, N> operator op(const vec<T, N>& a, S s) {                                \
    return a op vec<T, N>(s);                                                            \
  }                                                                                      \
  template <class T, int N, class S, class = enable_if_t<is_scalar_v<S>>>                \
  inline vec<T, N> operator op(S s, const vec<T, N>& a) {                                \
    return vec<T, N>(s) op a;                                                            \
  }                                                                                      \
  template <class T, int N, int... I>                                                    \
  inline auto operator op(const Swizzle<T, N, I...>& a, const vec<T, sizeof...(I)>& b) { \
    return a.get() op b;                                                                 \
  }                                                                                      \
  template <class T, int N, int... I>                                                    \
  inline auto operator op(const vec<T, sizeof...(I)>& a, const Swizzle<T, N, I...>& b) { \
    return a op b.get();                                                                 \
  }                                                                                      \
  template <class T, int N, int... I, int M, int... J>                                   \
  inline auto operator op(const Swizzle<T, N, I...>& a, const Swizzle<T, M, J...>& b) {  \
    return a.get() op b.get();                                                           \
  }                                                                                      \
  template <class T, int N, int... I, class S, class = enable_if_t<is_scalar_v<S>>>      \
  inline auto operator op(const Swizzle<T, N, I...>& a, S s) {                           \
    return a.get() op s;                                                                 \
  }                                                                                      \
  template <class T, int N, int... I, class S, class = enable_if_t<is_scalar_v<S>>>      \
  inline auto operator op(S s, const Swizzle<T, N, I...>& a) {                           \
    return s op a.get();                                                                 \
  }
MSL_OPERATOR(+)
MSL_OPERATOR(-)
MSL_OPERATOR(*)
MSL_OPERATOR(/)
MSL_OPERATOR(%)
MSL_OPERATOR(&)
MSL_OPERATOR(|)
MSL_OPERATOR(^)
MSL_OPERATOR(<<)
MSL_OPERATOR(>>)
#undef MSL_OPERATOR

#ifdef MSL_CHECK
// Vectors in the constant address space are another type: copy them first.
#define MSL_CONSTANT_OPERATOR(op)                                                         \
  template <class T, int N, class R>                                                      \
  inline auto operator op(const __constant vec<T, N>& a, const R& b) {                    \
    vec<T, N> t(a);                                                                       \
    return t op b;                                                                        \
  }                                                                                       \
  template <class T, int N, class L>                                                      \
  inline auto operator op(const L& a, const __constant vec<T, N>& b) {                    \
    vec<T, N> t(b);                                                                       \
    return a op t;                                                                        \
  }                                                                                       \
  template <class T, int N, int M>                                                        \
  inline auto operator op(const __constant vec<T, N>& a, const __constant vec<T, M>& b) { \
    vec<T, N> s(a);                                                                       \
    vec<T, M> t(b);                                                                       \
    return s op t;                                                                        \
  }
MSL_CONSTANT_OPERATOR(+)
MSL_CONSTANT_OPERATOR(-)
MSL_CONSTANT_OPERATOR(*)
MSL_CONSTANT_OPERATOR(/)
MSL_CONSTANT_OPERATOR(%)
MSL_CONSTANT_OPERATOR(&)
MSL_CONSTANT_OPERATOR(|)
MSL_CONSTANT_OPERATOR(^)
MSL_CONSTANT_OPERATOR(<<)
MSL_CONSTANT_OPERATOR(>>)
#undef MSL_CONSTANT_OPERATOR
#endif

#define MSL_COMPARE(op)                                                     \
  template <class T, int N>                                                 \
  inline vec<bool, N> operator op(const vec<T, N>& a, const vec<T, N>& b) { \
    vec<bool, N> r;                                                         \
    for (int i = 0; i < N; i++) r.v[i] = a.v[i] op b.v[i];                  \
    return r;                                                               \
  }                                                                         \
  template <class T, int N, class S, class = enable_if_t<is_scalar_v<S>>>   \
  inline vec<bool, N> operator op(const vec<T, N>& a, S s) {                \
    return a op vec<T, N>(s);                                               \
  }
MSL_COMPARE(<)
MSL_COMPARE(>)
MSL_COMPARE(<=)
MSL_COMPARE(>=)
MSL_COMPARE(==)
MSL_COMPARE(!=)
#undef MSL_COMPARE

template <class T, int N>
struct packed_vec {
  T v[N];
  packed_vec() = default;
  packed_vec(const vec<T, N>& o) {
    for (int i = 0; i < N; i++) v[i] = o.v[i];
  }
  operator vec<T, N>() const {
    vec<T, N> r;
    for (int i = 0; i < N; i++) r.v[i] = v[i];
    return r;
  }
  T& operator[](int i) { return v[i]; }
  const T& operator[](int i) const { return v[i]; }
#ifdef MSL_CHECK
  const __constant T& operator[](int i) const __constant { return v[i]; }
#endif
};

}  // namespace metal

#define MSL_VECTORS(T)                    \
  typedef metal::vec<T, 2> T##2;          \
  typedef metal::vec<T, 3> T##3;          \
  typedef metal::vec<T, 4> T##4;          \
  namespace metal {                       \
  using ::T##2;                           \
  using ::T##3;                           \
  using ::T##4;                           \
  typedef packed_vec<T, 2> packed_##T##2; \
  typedef packed_vec<T, 3> packed_##T##3; \
  typedef packed_vec<T, 4> packed_##T##4; \
  }
MSL_VECTORS(float)
MSL_VECTORS(bfloat)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(bool)
#undef MSL_VECTORS
// By hand: in the check build `half` is a macro, which ## would not expand.
typedef metal::vec<half, 2> half2;
typedef metal::vec<half, 3> half3;
typedef metal::vec<half, 4> half4;
namespace metal {
using ::half2;
using ::half3;
using ::half4;
typedef packed_vec<half, 2> packed_half2;
typedef packed_vec<half, 3> packed_half3;
typedef packed_vec<half, 4> packed_half4;
}  // namespace metal

template <class To, class From>
inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type: sizes differ");
  union Bits {
    From from;
    To to;
    Bits() {}
  } bits;
  bits.from = from;
  return bits.to;
}
namespace metal {
using ::as_type;
}
