// <metal_type_traits>, without the host's library: its headers would be instrumented along with the kernel.
#pragma once

#include "msl_config.h"

namespace metal {

using ::uchar;
using ::uint;
using ::ulong;
using ::ushort;

template <class T, T v>
struct integral_constant {
  static constexpr const T value = v;
  using value_type = T;
  constexpr operator T() const { return v; }
  constexpr T operator()() const { return v; }
};
template <bool b>
using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};
template <class A, class B>
inline constexpr const bool is_same_v = is_same<A, B>::value;

template <bool b, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool b, class T = void>
using enable_if_t = typename enable_if<b, T>::type;

template <bool b, class A, class B>
struct conditional {
  using type = A;
};
template <class A, class B>
struct conditional<false, A, B> {
  using type = B;
};
template <bool b, class A, class B>
using conditional_t = typename conditional<b, A, B>::type;

template <class T>
struct remove_cv {
  using type = T;
};
template <class T>
struct remove_cv<const T> {
  using type = T;
};
template <class T>
struct remove_cv<volatile T> {
  using type = T;
};
template <class T>
struct remove_cv<const volatile T> {
  using type = T;
};
template <class T>
using remove_cv_t = typename remove_cv<T>::type;
template <class T>
struct remove_reference {
  using type = T;
};
template <class T>
struct remove_reference<T&> {
  using type = T;
};
template <class T>
using remove_reference_t = typename remove_reference<T>::type;
template <class T>
struct remove_pointer {
  using type = T;
};
template <class T>
struct remove_pointer<T*> {
  using type = T;
};
template <class T>
using remove_pointer_t = typename remove_pointer<T>::type;
template <class T>
struct is_pointer : false_type {};
template <class T>
struct is_pointer<T*> : true_type {};

template <class T>
struct remove_addrspace {
  using type = T;
};
#ifdef MSL_CHECK
template <class T>
struct remove_addrspace<__private T> {
  using type = T;
};
template <class T>
struct remove_addrspace<__global T> {
  using type = T;
};
template <class T>
struct remove_addrspace<__local T> {
  using type = T;
};
template <class T>
struct remove_addrspace<__generic T> {
  using type = T;
};
#endif
template <class T>
using remove_addrspace_t = typename remove_addrspace<T>::type;

// std::array, as <metal_array> has it.
template <class T, size_t N>
struct array {
  T elements[N];
  constexpr T thread& operator[](size_t i) thread { return elements[i]; }
  constexpr const T thread& operator[](size_t i) const thread { return elements[i]; }
  constexpr size_t size() const { return N; }
};

}  // namespace metal
