// <metal_math>, <metal_common>, <metal_integer>, <metal_relational>, numeric_limits. Functions of float are
// the host's, correctly rounded or nearly so: a GPU's are not, so tests against them need a tolerance.
#pragma once

#include "msl_vector.h"

namespace metal {

template <class T>
struct numeric_limits {
  static constexpr const bool is_signed = T(-1) < T(0);
  static constexpr T max() { return is_signed ? T((1ull << (8 * sizeof(T) - 1)) - 1) : T(-1); }
  static constexpr T min() { return is_signed ? T(-max() - 1) : T(0); }
  static constexpr T lowest() { return min(); }
};
template <>
struct numeric_limits<bool> {
  static constexpr bool max() { return true; }
  static constexpr bool min() { return false; }
};
template <>
struct numeric_limits<float> {
  static constexpr float max() { return FLT_MAX; }
  static constexpr float min() { return FLT_MIN; }
  static constexpr float lowest() { return -FLT_MAX; }
  static constexpr float infinity() { return INFINITY; }
  static constexpr float quiet_NaN() { return NAN; }
  static constexpr float epsilon() { return FLT_EPSILON; }
};
template <class Format>
struct numeric_limits<Small<Format>> {
  static constexpr const bool is_half = is_same_v<Format, HalfFormat>;
  static constexpr Small<Format> raw(uint16_t bits) {
    return Small<Format>(typename Small<Format>::Raw{}, bits);
  }
  static constexpr Small<Format> max() { return raw(is_half ? 0x7bff : 0x7f7f); }
  static constexpr Small<Format> lowest() { return raw(is_half ? 0xfbff : 0xff7f); }
  static constexpr Small<Format> min() { return raw(is_half ? 0x0400 : 0x0080); }
  static constexpr Small<Format> infinity() { return raw(is_half ? 0x7c00 : 0x7f80); }
  static constexpr Small<Format> epsilon() { return raw(is_half ? 0x1400 : 0x3c00); }
};

// A function of one float, of the small types by way of float, and of vectors by component.
#define MSL_UNARY(name, expression)                    \
  inline float name(float x) { return expression; }    \
  template <class Format>                              \
  inline Small<Format> name(Small<Format> h) {         \
    float x = h;                                       \
    return Small<Format>(expression);                  \
  }                                                    \
  template <class T, int N>                            \
  inline vec<T, N> name(const vec<T, N>& a) {          \
    vec<T, N> r;                                       \
    for (int i = 0; i < N; i++) r.v[i] = name(a.v[i]); \
    return r;                                          \
  }
#define MSL_BINARY(name, expression)                              \
  inline float name(float x, float y) { return expression; }      \
  template <class T, int N>                                       \
  inline vec<T, N> name(const vec<T, N>& a, const vec<T, N>& b) { \
    vec<T, N> r;                                                  \
    for (int i = 0; i < N; i++) r.v[i] = T(name(a.v[i], b.v[i])); \
    return r;                                                     \
  }
// What metal::, metal::precise:: and metal::fast:: have in common.
#define MSL_FUNCTIONS                                                     \
  MSL_UNARY(exp, __builtin_expf(x))                                       \
  MSL_UNARY(exp2, __builtin_exp2f(x))                                     \
  MSL_UNARY(exp10, __builtin_powf(10.0f, x))                              \
  MSL_UNARY(log, __builtin_logf(x))                                       \
  MSL_UNARY(log2, __builtin_log2f(x))                                     \
  MSL_UNARY(log10, __builtin_log10f(x))                                   \
  MSL_UNARY(sqrt, __builtin_sqrtf(x))                                     \
  MSL_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))                             \
  MSL_UNARY(sin, __builtin_sinf(x))                                       \
  MSL_UNARY(cos, __builtin_cosf(x))                                       \
  MSL_UNARY(tan, __builtin_tanf(x))                                       \
  MSL_UNARY(asin, __builtin_asinf(x))                                     \
  MSL_UNARY(acos, __builtin_acosf(x))                                     \
  MSL_UNARY(atan, __builtin_atanf(x))                                     \
  MSL_UNARY(sinh, __builtin_sinhf(x))                                     \
  MSL_UNARY(cosh, __builtin_coshf(x))                                     \
  MSL_UNARY(tanh, __builtin_tanhf(x))                                     \
  MSL_UNARY(fabs, __builtin_fabsf(x))                                     \
  MSL_UNARY(floor, __builtin_floorf(x))                                   \
  MSL_UNARY(ceil, __builtin_ceilf(x))                                     \
  MSL_UNARY(rint, __builtin_rintf(x))                                     \
  MSL_UNARY(round, __builtin_roundf(x))                                   \
  MSL_UNARY(trunc, __builtin_truncf(x))                                   \
  MSL_UNARY(fract, x - __builtin_floorf(x))                               \
  MSL_UNARY(sinpi, __builtin_sinf(M_PI_F* x))                             \
  MSL_UNARY(cospi, __builtin_cosf(M_PI_F* x))                             \
  MSL_UNARY(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))    \
  MSL_UNARY(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == x ? x : 0.0f) \
  MSL_BINARY(pow, __builtin_powf(x, y))                                   \
  MSL_BINARY(powr, __builtin_powf(x, y))                                  \
  MSL_BINARY(divide, x / y)                                               \
  MSL_BINARY(fmod, __builtin_fmodf(x, y))                                 \
  MSL_BINARY(atan2, __builtin_atan2f(x, y))                               \
  MSL_BINARY(fmax, __builtin_fmaxf(x, y))                                 \
  MSL_BINARY(fmin, __builtin_fminf(x, y))                                 \
  MSL_BINARY(copysign, __builtin_copysignf(x, y))                         \
  MSL_BINARY(step, y < x ? 0.0f : 1.0f)

MSL_FUNCTIONS
namespace precise {
MSL_FUNCTIONS
}
namespace fast {
MSL_FUNCTIONS
}
#undef MSL_FUNCTIONS
#undef MSL_BINARY
#undef MSL_UNARY

inline float sincos(float x, float thread& c) {
  c = __builtin_cosf(x);
  return __builtin_sinf(x);
}
inline float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <class Format>
inline Small<Format> fma(Small<Format> a, Small<Format> b, Small<Format> c) {
  return Small<Format>(__builtin_fmaf(a, b, c));
}
template <class T, int N>
inline vec<T, N> fma(const vec<T, N>& a, const vec<T, N>& b, const vec<T, N>& c) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r.v[i] = fma(a.v[i], b.v[i], c.v[i]);
  return r;
}

template <class T, class = enable_if_t<is_scalar_v<T>>>
inline T abs(T x) {
  return x < T(0) ? T(-x) : x;
}
template <class T, class = enable_if_t<is_scalar_v<T>>>
inline T min(T a, T b) {
  return b < a ? b : a;
}
template <class T, class = enable_if_t<is_scalar_v<T>>>
inline T max(T a, T b) {
  return a < b ? b : a;
}
template <class T, int N>
inline vec<T, N> abs(const vec<T, N>& a) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r.v[i] = abs(a.v[i]);
  return r;
}
template <class T, int N>
inline vec<T, N> min(const vec<T, N>& a, const vec<T, N>& b) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r.v[i] = min(a.v[i], b.v[i]);
  return r;
}
template <class T, int N>
inline vec<T, N> max(const vec<T, N>& a, const vec<T, N>& b) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r.v[i] = max(a.v[i], b.v[i]);
  return r;
}
template <class T>
inline T min3(T a, T b, T c) {
  return min(a, min(b, c));
}
template <class T>
inline T max3(T a, T b, T c) {
  return max(a, max(b, c));
}
template <class T>
inline T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <class T>
inline T mix(T a, T b, T t) {
  return a + (b - a) * t;
}
template <class T>
inline T select(T a, T b, bool c) {
  return c ? b : a;
}
template <class T, int N>
inline vec<T, N> select(const vec<T, N>& a, const vec<T, N>& b, const vec<bool, N>& c) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r.v[i] = c.v[i] ? b.v[i] : a.v[i];
  return r;
}

template <class T, int N>
inline T dot(const vec<T, N>& a, const vec<T, N>& b) {
  T s = a.v[0] * b.v[0];
  for (int i = 1; i < N; i++) s = T(s + a.v[i] * b.v[i]);
  return s;
}
template <int N>
inline float length_squared(const vec<float, N>& a) {
  return dot(a, a);
}
template <int N>
inline float length(const vec<float, N>& a) {
  return __builtin_sqrtf(dot(a, a));
}
template <int N>
inline vec<float, N> normalize(const vec<float, N>& a) {
  return a / length(a);
}

template <class T, int N>
inline bool all(const vec<T, N>& a) {
  for (int i = 0; i < N; i++)
    if (!a.v[i]) return false;
  return true;
}
template <class T, int N>
inline bool any(const vec<T, N>& a) {
  for (int i = 0; i < N; i++)
    if (a.v[i]) return true;
  return false;
}
inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return __builtin_fabsf(x) == INFINITY; }
inline bool isfinite(float x) { return __builtin_fabsf(x) < INFINITY; }
inline bool signbit(float x) { return as_type<uint>(x) >> 31; }

// Of unsigned types of 8 to 64 bits.
template <class T>
inline T popcount(T x) {
  return T(__builtin_popcountll((unsigned long long)x & (~0ull >> (64 - 8 * sizeof(T)))));
}
template <class T>
inline T clz(T x) {
  return x ? T(__builtin_clzll((unsigned long long)x & (~0ull >> (64 - 8 * sizeof(T)))) -
               (64 - 8 * sizeof(T)))
           : T(8 * sizeof(T));
}
template <class T>
inline T ctz(T x) {
  return x ? T(__builtin_ctzll((unsigned long long)x)) : T(8 * sizeof(T));
}
template <class T>
inline T reverse_bits(T x) {
  T r = 0;
  for (unsigned i = 0; i < 8 * sizeof(T); i++) r = T(r | (T((x >> i) & 1) << (8 * sizeof(T) - 1 - i)));
  return r;
}
inline uint rotate(uint x, uint n) { return (x << (n & 31)) | (x >> ((32 - n) & 31)); }
inline uint mulhi(uint a, uint b) { return (uint)(((ulong)a * b) >> 32); }
inline int mulhi(int a, int b) { return (int)(((long)a * b) >> 32); }
inline uint extract_bits(uint x, uint offset, uint bits) {
  return bits == 0 ? 0 : (x >> offset) & (bits >= 32 ? ~0u : ((1u << bits) - 1));
}
inline int extract_bits(int x, uint offset, uint bits) {
  return bits == 0 ? 0 : (int)((uint)x << (32 - offset - bits)) >> (32 - bits);
}
inline uint insert_bits(uint base, uint insert, uint offset, uint bits) {
  if (bits == 0) return base;
  uint mask = (bits >= 32 ? ~0u : ((1u << bits) - 1)) << offset;
  return (base & ~mask) | ((insert << offset) & mask);
}

}  // namespace metal
