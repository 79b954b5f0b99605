// <metal_atomic>. Each operation is noted with the tracer: atomic against atomic is no race, against a plain
// access it is.
#pragma once

#include "msl_math.h"

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
enum memory_order { memory_order_relaxed };
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device
};

template <class T>
struct atomic {
  T v;
};
typedef atomic<uint> atomic_uint;
typedef atomic<int> atomic_int;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;

#ifndef MSL_CHECK

template <class T>
MSL_CALL T atomic_load_explicit(const volatile atomic<T>* p, memory_order) {
  lily::emulator::note_atomic(p, sizeof(T), false);
  T x;
  __atomic_load(&p->v, &x, __ATOMIC_RELAXED);
  return x;
}
template <class T>
MSL_CALL void atomic_store_explicit(volatile atomic<T>* p, decltype(p->v) x, memory_order) {
  lily::emulator::note_atomic(p, sizeof(T), true);
  __atomic_store(&p->v, &x, __ATOMIC_RELAXED);
}
template <class T>
MSL_CALL T atomic_exchange_explicit(volatile atomic<T>* p, decltype(p->v) x, memory_order) {
  lily::emulator::note_atomic(p, sizeof(T), true);
  T old;
  __atomic_exchange(&p->v, &x, &old, __ATOMIC_RELAXED);
  return old;
}
template <class T>
MSL_CALL bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* p, T* expected,
                                                    decltype(p->v) desired, memory_order, memory_order) {
  lily::emulator::note_atomic(p, sizeof(T), true);
  return __atomic_compare_exchange(&p->v, expected, &desired, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
#define MSL_FETCH(name, expression)                                                                     \
  template <class T>                                                                                    \
  MSL_CALL T atomic_fetch_##name##_explicit(volatile atomic<T>* p, decltype(p->v) x, memory_order) {    \
    lily::emulator::note_atomic(p, sizeof(T), true);                                                    \
    T old, next;                                                                                        \
    __atomic_load(&p->v, &old, __ATOMIC_RELAXED);                                                       \
    do {                                                                                                \
      next = T(expression);                                                                             \
    } while (!__atomic_compare_exchange(&p->v, &old, &next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)); \
    return old;                                                                                         \
  }
#else
#define MSL_ATOMICS(space)                                                                        \
  template <class T>                                                                              \
  T atomic_load_explicit(const volatile space atomic<T>* p, memory_order);                        \
  template <class T>                                                                              \
  void atomic_store_explicit(volatile space atomic<T>* p, remove_addrspace_t<T> x, memory_order); \
  template <class T>                                                                              \
  T atomic_exchange_explicit(volatile space atomic<T>* p, remove_addrspace_t<T> x, memory_order); \
  template <class T>                                                                              \
  bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>* p, thread T* expected,     \
                                             remove_addrspace_t<T> desired, memory_order, memory_order);
MSL_ATOMICS(device)
MSL_ATOMICS(threadgroup)
#define MSL_FETCH(name, expression)                                                                      \
  template <class T>                                                                                     \
  T atomic_fetch_##name##_explicit(volatile device atomic<T>* p, remove_addrspace_t<T> x, memory_order); \
  template <class T>                                                                                     \
  T atomic_fetch_##name##_explicit(volatile threadgroup atomic<T>* p, remove_addrspace_t<T> x,           \
                                   memory_order);
#endif
MSL_FETCH(add, old + x)
MSL_FETCH(sub, old - x)
MSL_FETCH(min, min(old, x))
MSL_FETCH(max, max(old, x))
MSL_FETCH(and, old& x)
MSL_FETCH(or, old | x)
MSL_FETCH(xor, old ^ x)
#undef MSL_FETCH

}  // namespace metal
