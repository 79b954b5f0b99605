// What the rewriter emits: kernel arguments by attribute, threadgroup variables, function constants, the
// table.
#pragma once

#include "msl_simdgroup_matrix.h"

#ifndef MSL_CHECK

namespace metal {
namespace entry {

using lily::emulator::ArgumentInfo;
using lily::emulator::current_thread;

template <class T>
struct Identity {
  using type = T;
};
template <class T>
MSL_QUIET inline T& threadgroup_object(uint32_t key) {
  return *(T*)lily::emulator::threadgroup_variable(key, sizeof(T), alignof(T) < 16 ? 16 : alignof(T));
}

// One type a kind of kernel argument, with get<P>() for a parameter of type P.
template <unsigned index, bool writable, bool optional>
struct Buffer {
  template <class P>
  MSL_QUIET static P get() {
    void* p = current_thread->group->launch->buffers[index];
    if constexpr (__is_lvalue_reference(P)) return *(remove_reference_t<P>*)p;
    else return (P)p;
  }
};
template <unsigned index>
struct ThreadgroupMemory {
  template <class P>
  MSL_QUIET static P get() {
    return (P)lily::emulator::threadgroup_argument(index);
  }
};

// A position or size in a parameter of one, two or three components.
template <class P>
MSL_QUIET inline P triple(uint32_t x, uint32_t y, uint32_t z) {
  if constexpr (is_scalar_v<P>) return P(x);
  else if constexpr (Components<P>::n == 2) return P(x, y);
  else return P(x, y, z);
}
#define MSL_INPUT(name, expression)    \
  struct Input_##name {                \
    template <class P>                 \
    MSL_QUIET static P get() {         \
      const auto& t = *current_thread; \
      const auto& g = *t.group;        \
      const auto& l = *g.launch;       \
      (void)l;                         \
      return expression;               \
    }                                  \
  };
#define MSL_GRID(d) (g.id[d] * l.threads[d] + t.position[d])
MSL_INPUT(thread_position_in_grid, triple<P>(MSL_GRID(0), MSL_GRID(1), MSL_GRID(2)))
MSL_INPUT(thread_position_in_threadgroup, triple<P>(t.position[0], t.position[1], t.position[2]))
MSL_INPUT(threadgroup_position_in_grid, triple<P>(g.id[0], g.id[1], g.id[2]))
MSL_INPUT(threadgroups_per_grid, triple<P>(l.groups[0], l.groups[1], l.groups[2]))
MSL_INPUT(threads_per_threadgroup, triple<P>(l.threads[0], l.threads[1], l.threads[2]))
MSL_INPUT(dispatch_threads_per_threadgroup, triple<P>(l.threads[0], l.threads[1], l.threads[2]))
MSL_INPUT(threads_per_grid,
          triple<P>(l.groups[0] * l.threads[0], l.groups[1] * l.threads[1], l.groups[2] * l.threads[2]))
MSL_INPUT(thread_index_in_simdgroup, P(t.lane))
MSL_INPUT(simdgroup_index_in_threadgroup, P(t.simdgroup_index))
MSL_INPUT(thread_index_in_threadgroup, P(t.index))
MSL_INPUT(simdgroups_per_threadgroup, P(g.n_simdgroups))
MSL_INPUT(threads_per_simdgroup, P(32))
#undef MSL_INPUT
#undef MSL_GRID

template <class F>
struct Signature;
template <class... P>
struct Signature<void (*)(P...)> {
  template <auto F, class... A>
  static void call() {
    F(A::template get<P>()...);
  }
  template <class A, class Q>
  struct Info {
    static constexpr const unsigned n = 0;
    static constexpr void add(ArgumentInfo*&) {}
  };
  template <unsigned index, bool writable, bool optional, class Q>
  struct Info<Buffer<index, writable, optional>, Q> {
    static constexpr const unsigned n = 1;
    static constexpr void add(ArgumentInfo*& out) {
      constexpr bool reference = __is_lvalue_reference(Q);
      using T = conditional_t<reference, remove_reference_t<Q>, remove_pointer_t<Q>>;
      *out++ = {index,     reference ? ArgumentInfo::reference : ArgumentInfo::pointer,
                writable,  optional,
                sizeof(T), alignof(T)};
    }
  };
  // One more than needed, since an array cannot be empty.
  template <class... A>
  struct Table {
    static constexpr const unsigned n = (0u + ... + Info<A, P>::n);
    ArgumentInfo info[n + 1] = {};
    constexpr Table() {
      ArgumentInfo* out = info;
      (Info<A, P>::add(out), ...);
    }
  };
};
template <class... A>
struct Arguments {};

template <auto F, class A>
struct Kernel;
template <auto F, class... A>
struct Kernel<F, Arguments<A...>> {
  using S = Signature<decltype(F)>;
  static constexpr const typename S::template Table<A...> table{};
  static void body() { S::template call<F, A...>(); }
};

template <class T>
inline constexpr const char constant_type = is_same_v<T, bool>    ? 'b'
                                            : is_same_v<T, int>   ? 'i'
                                            : is_same_v<T, uint>  ? 'u'
                                            : is_same_v<T, float> ? 'f'
                                                                  : '?';

}  // namespace entry
}  // namespace metal

#define MSL_THREADGROUP(T, name, dimensions, key) \
  auto& name = metal::entry::threadgroup_object<  \
      typename metal::entry::Identity<MSL_STRIP(T) MSL_STRIP(dimensions)>::type>(key);
#define MSL_INSTANTIATE(...)
#define MSL_FUNCTION_CONSTANT(T, name, index) \
  static T name;                              \
  static bool MSL_JOIN(msl_defined_, name);
#define MSL_CONSTANT_SLOT(T, name, index) \
  {index, sizeof(T), (void*)&name, &MSL_JOIN(msl_defined_, name), #name, metal::entry::constant_type<T>},
#define MSL_KERNEL(host_name, function, ...)                                                           \
  {host_name, &metal::entry::Kernel<&MSL_STRIP(function), metal::entry::Arguments<__VA_ARGS__>>::body, \
   metal::entry::Kernel<&MSL_STRIP(function), metal::entry::Arguments<__VA_ARGS__>>::table.info,       \
   metal::entry::Kernel<&MSL_STRIP(function), metal::entry::Arguments<__VA_ARGS__>>::table.n},
#define is_function_constant_defined(name) MSL_JOIN(msl_defined_, name)

#else

namespace metal {
namespace entry {
template <class T>
struct Identity {
  using type = T;
};
template <class T>
threadgroup T& threadgroup_object();
}  // namespace entry
}  // namespace metal
#define MSL_THREADGROUP(T, name, dimensions, key)                                               \
  threadgroup typename metal::entry::Identity<MSL_STRIP(T) MSL_STRIP(dimensions)>::type& name = \
      metal::entry::threadgroup_object<                                                         \
          typename metal::entry::Identity<MSL_STRIP(T) MSL_STRIP(dimensions)>::type>();
#define MSL_INSTANTIATE(...) __VA_ARGS__
#define MSL_FUNCTION_CONSTANT(T, name, index) constant T name = T();
#define is_function_constant_defined(name) true

#endif
