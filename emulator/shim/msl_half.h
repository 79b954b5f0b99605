// half and bfloat: 16 bits of storage. Arithmetic converts to float, computes one operation there and rounds
// back, which is what a GPU with native 16-bit arithmetic returns for + - * /. Classes rather than the
// compiler's own types: bfloat conversions of those need a newer support library than some hosts have.
#pragma once

#include "msl_traits.h"

namespace metal {

struct HalfFormat {
  static uint16_t from_float(float x) {
#ifdef MSL_CHECK
    return 0;
#else
    return __builtin_bit_cast(uint16_t, (__fp16)x);
#endif
  }
  static float to_float(uint16_t bits) {
#ifdef MSL_CHECK
    return 0.0f;
#else
    return (float)__builtin_bit_cast(__fp16, bits);
#endif
  }
};

struct BfloatFormat {
  static uint16_t from_float(float x) {
    uint u = __builtin_bit_cast(uint, x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 64);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
  }
  static float to_float(uint16_t bits) { return __builtin_bit_cast(float, (uint)bits << 16); }
};

// Operators are templates on exact types; a conversion on both sides would make `half * 2.0f` ambiguous.
template <class Format>
struct Small {
  uint16_t bits;

  Small() = default;
  struct Raw {};
  constexpr Small(Raw, uint16_t b) : bits(b) {}
  template <class T, class = enable_if_t<__is_arithmetic(T)>>
  Small(T v) : bits(Format::from_float((float)v)) {}
  template <class Other>
  explicit Small(const Small<Other>& other) : bits(Format::from_float((float)other)) {}
  operator float() const { return Format::to_float(bits); }
#ifdef MSL_CHECK
  Small(const Small&) = default;
  Small(const __constant Small& other) : bits(other.bits) {}
  operator float() const __constant { return 0.0f; }
#endif
  Small operator-() const {
    Small r;
    r.bits = bits ^ 0x8000;
    return r;
  }
#define MSL_ASSIGN(op)                       \
  template <class T>                         \
  Small& operator op##=(T v) {               \
    *this = Small(float(*this) op float(v)); \
    return *this;                            \
  }
  MSL_ASSIGN(+)
  MSL_ASSIGN(-)
  MSL_ASSIGN(*)
  MSL_ASSIGN(/)
#undef MSL_ASSIGN
};

}  // namespace metal

typedef metal::Small<metal::HalfFormat> half;
typedef metal::Small<metal::BfloatFormat> bfloat;

namespace metal {

using bfloat = ::bfloat;
using half = ::half;

template <class T>
struct is_small : false_type {};
template <class Format>
struct is_small<Small<Format>> : true_type {};

template <class T>
inline constexpr const bool is_scalar_v = __is_arithmetic(T) || is_small<T>::value;
template <class T>
inline constexpr const bool is_floating_point_v = is_same_v<T, float> || is_small<T>::value;
template <class T>
inline constexpr const bool is_integral_v = __is_integral(T);
template <class T>
struct is_scalar : bool_constant<is_scalar_v<T>> {};
template <class T>
struct is_integral : bool_constant<__is_integral(T)> {};
template <class T>
struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <class T>
struct is_arithmetic : bool_constant<is_scalar_v<T>> {};

// Type of a mixed scalar operation: float beside a float, the small type beside an integer or its own kind.
// half with bfloat has none, as in Metal.
template <class A, class B>
struct Mixed {};
template <class Format, class T>
struct Mixed<Small<Format>, T> {
  using type = conditional_t<__is_integral(T), Small<Format>, float>;
};
template <class Format, class T>
struct Mixed<T, Small<Format>> {
  using type = conditional_t<__is_integral(T), Small<Format>, float>;
};
template <class Format>
struct Mixed<Small<Format>, Small<Format>> {
  using type = Small<Format>;
};
template <class A, class B>
struct Mixed<Small<A>, Small<B>> {};

template <class A, class B>
using enable_if_mixed =
    enable_if_t<(is_small<A>::value || is_small<B>::value) && is_scalar_v<A> && is_scalar_v<B>>;

#define MSL_MIXED(op)                                                \
  template <class A, class B, class = enable_if_mixed<A, B>>         \
  inline typename Mixed<A, B>::type operator op(A a, B b) {          \
    return typename Mixed<A, B>::type(float(a) op float(b));         \
  }                                                                  \
  template <class A, class B, class = enable_if_t<!is_same_v<A, B>>> \
  void operator op(Small<A> a, Small<B> b) = delete;
MSL_MIXED(+)
MSL_MIXED(-)
MSL_MIXED(*)
MSL_MIXED(/)
#undef MSL_MIXED

#define MSL_COMPARE(op)                                                                          \
  template <class A, class B, class = enable_if_mixed<A, B>, class = typename Mixed<A, B>::type> \
  inline bool operator op(A a, B b) {                                                            \
    return float(a) op float(b);                                                                 \
  }
MSL_COMPARE(<)
MSL_COMPARE(>)
MSL_COMPARE(<=)
MSL_COMPARE(>=)
MSL_COMPARE(==)
MSL_COMPARE(!=)
#undef MSL_COMPARE

}  // namespace metal
