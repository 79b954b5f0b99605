// Barriers and simdgroup functions. A collective deposits each lane's value in a slot; the last lane to
// arrive combines them (reductions, scans, votes), or every lane reads the slot it wants (shuffles).
#pragma once

#include "msl_atomic.h"

namespace metal {

#ifndef MSL_CHECK

MSL_CALL inline void threadgroup_barrier(mem_flags flags) {
  lily::emulator::threadgroup_barrier((unsigned)flags, MSL_SITE);
}
MSL_CALL inline void simdgroup_barrier(mem_flags flags) {
  lily::emulator::simdgroup_barrier((unsigned)flags, MSL_SITE);
}

namespace simd {

using lily::emulator::Combine;
using lily::emulator::kLanes;
using lily::emulator::Operation;
using lily::emulator::Simdgroup;

MSL_QUIET inline unsigned lane() { return lily::emulator::current_thread->lane; }

template <class T>
MSL_QUIET T* slots(Simdgroup& s, unsigned parity) {
  static_assert(sizeof(T) <= lily::emulator::kSlotBytes);
  return (T*)s.slots[parity];
}
template <class T>
MSL_QUIET T* results(Simdgroup& s, unsigned parity) {
  return (T*)s.results[parity];
}
template <class T>
MSL_QUIET void deposit(const T& value) {
  Simdgroup& s = *lily::emulator::current_thread->simdgroup;
  slots<T>(s, s.sequence & 1)[lane()] = value;
}
template <class T>
MSL_QUIET T collect(Operation operation, T value, const void* site, Combine combine) {
  deposit(value);
  const unsigned parity = lily::emulator::simd_collect(operation, site, combine);
  return results<T>(*lily::emulator::current_thread->simdgroup, parity)[lane()];
}

// Lanes outside of the simdgroup's own are no source: the value is undefined in Metal, an error here unless
// the operation defines it. `source` is from -32 to 63.
template <class T>
MSL_QUIET T exchange(Operation operation, T value, int source, const void* site) {
  deposit(value);
  const unsigned parity = lily::emulator::simd_collect(operation, site, nullptr);
  Simdgroup& s = *lily::emulator::current_thread->simdgroup;
  if (source < 0 || source >= (int)kLanes) return value;
  if (!(s.full >> source & 1)) lily::emulator::report_inactive_lane(lane(), source);
  return slots<T>(s, parity)[source];
}

struct Add {
  template <class T>
  static T apply(T a, T b) {
    return T(a + b);
  }
  template <class T>
  static T identity() {
    return T(0);
  }
};
struct Multiply {
  template <class T>
  static T apply(T a, T b) {
    return T(a * b);
  }
  template <class T>
  static T identity() {
    return T(1);
  }
};
struct Min {
  template <class T>
  static T apply(T a, T b) {
    return min(a, b);
  }
};
struct Max {
  template <class T>
  static T apply(T a, T b) {
    return max(a, b);
  }
};
struct And {
  template <class T>
  static T apply(T a, T b) {
    return T(a & b);
  }
};
struct Or {
  template <class T>
  static T apply(T a, T b) {
    return T(a | b);
  }
};
struct Xor {
  template <class T>
  static T apply(T a, T b) {
    return T(a ^ b);
  }
};

// In pairs, as a butterfly over the lanes would.
template <class T, class Op>
MSL_QUIET void reduce(Simdgroup& s, unsigned parity) {
  T* v = slots<T>(s, parity);
  const unsigned n = (unsigned)__builtin_popcount(s.full);
  for (unsigned step = 1; step < n; step *= 2)
    for (unsigned i = 0; i + step < n; i += 2 * step) v[i] = Op::template apply<T>(v[i], v[i + step]);
  T* r = results<T>(s, parity);
  for (unsigned i = 0; i < kLanes; i++) r[i] = v[0];
}
template <class T, class Op, bool exclusive>
MSL_QUIET void scan(Simdgroup& s, unsigned parity) {
  const T* v = slots<T>(s, parity);
  T* r = results<T>(s, parity);
  T sum = Op::template identity<T>();
  for (unsigned i = 0; i < (unsigned)__builtin_popcount(s.full); i++) {
    const T next = Op::template apply<T>(sum, v[i]);
    r[i] = exclusive ? sum : next;
    sum = next;
  }
}
MSL_QUIET inline void vote(Simdgroup& s, unsigned parity) {
  ulong mask = 0;
  const ulong* v = slots<ulong>(s, parity);
  for (unsigned i = 0; i < (unsigned)__builtin_popcount(s.full); i++) mask |= v[i] << i;
  for (unsigned i = 0; i < kLanes; i++) results<ulong>(s, parity)[i] = mask;
}

}  // namespace simd

#define MSL_REDUCE(name, Op)                                                                  \
  template <class T>                                                                          \
  MSL_CALL T simd_##name(T v) {                                                               \
    return simd::collect(lily::emulator::op_##name, v, MSL_SITE, &simd::reduce<T, simd::Op>); \
  }
#define MSL_SCAN(name, Op, exclusive)                                                                  \
  template <class T>                                                                                   \
  MSL_CALL T simd_##name(T v) {                                                                        \
    return simd::collect(lily::emulator::op_##name, v, MSL_SITE, &simd::scan<T, simd::Op, exclusive>); \
  }
#define MSL_SHUFFLE(name, source)                                          \
  template <class T>                                                       \
  MSL_CALL T simd_##name(T v, ushort n) {                                  \
    const int lane = (int)simd::lane();                                    \
    return simd::exchange(lily::emulator::op_##name, v, source, MSL_SITE); \
  }
// The quads' four lanes exchange among themselves, but all of a simdgroup must come.
#define MSL_QUAD_REDUCE(name, Op)                                                                 \
  template <class T>                                                                              \
  MSL_CALL T quad_##name(T v) {                                                                   \
    const int lane = (int)simd::lane();                                                           \
    v = simd::Op::apply<T>(v, simd::exchange(lily::emulator::op_quad, v, lane ^ 1, MSL_SITE));    \
    return simd::Op::apply<T>(v, simd::exchange(lily::emulator::op_quad, v, lane ^ 2, MSL_SITE)); \
  }
#else
MSL_CALL void threadgroup_barrier(mem_flags flags);
MSL_CALL void simdgroup_barrier(mem_flags flags);
#define MSL_REDUCE(name, Op) \
  template <class T>         \
  T simd_##name(T v);
#define MSL_SCAN(name, Op, exclusive) MSL_REDUCE(name, Op)
#define MSL_SHUFFLE(name, source) \
  template <class T>              \
  T simd_##name(T v, ushort n);
#define MSL_QUAD_REDUCE(name, Op) \
  template <class T>              \
  T quad_##name(T v);
#endif

MSL_REDUCE(sum, Add)
MSL_REDUCE(product, Multiply)
MSL_REDUCE(min, Min)
MSL_REDUCE(max, Max)
MSL_REDUCE(and, And)
MSL_REDUCE(or, Or)
MSL_REDUCE(xor, Xor)
MSL_SCAN(prefix_exclusive_sum, Add, true)
MSL_SCAN(prefix_inclusive_sum, Add, false)
MSL_SCAN(prefix_exclusive_product, Multiply, true)
MSL_SCAN(prefix_inclusive_product, Multiply, false)
MSL_SHUFFLE(shuffle, (void(lane), (int)n))
MSL_SHUFFLE(broadcast, (void(lane), (int)n))
MSL_SHUFFLE(shuffle_xor, lane ^ (int)n)
MSL_SHUFFLE(shuffle_up, lane - (int)n)
MSL_SHUFFLE(shuffle_down, lane + (int)n)
MSL_SHUFFLE(shuffle_rotate_up, (lane - (int)n) & 31)
MSL_SHUFFLE(shuffle_rotate_down, (lane + (int)n) & 31)
MSL_QUAD_REDUCE(sum, Add)
MSL_QUAD_REDUCE(min, Min)
MSL_QUAD_REDUCE(max, Max)
#undef MSL_REDUCE
#undef MSL_SCAN
#undef MSL_SHUFFLE
#undef MSL_QUAD_REDUCE

#ifndef MSL_CHECK
// Lanes shifted in from outside take theirs from `filling`.
template <class T>
MSL_CALL T simd_shuffle_and_fill_up(T v, T filling, ushort n) {
  const int source = (int)simd::lane() - (int)n;
  const T shifted = simd::exchange(lily::emulator::op_fill_up, v, source, MSL_SITE);
  const T filled = simd::exchange(lily::emulator::op_fill_up, filling, source & 31, MSL_SITE);
  return source < 0 ? filled : shifted;
}
template <class T>
MSL_CALL T simd_shuffle_and_fill_down(T v, T filling, ushort n) {
  const int source = (int)simd::lane() + (int)n;
  const T shifted = simd::exchange(lily::emulator::op_fill_down, v, source, MSL_SITE);
  const T filled = simd::exchange(lily::emulator::op_fill_down, filling, source & 31, MSL_SITE);
  return source > 31 ? filled : shifted;
}
template <class T>
MSL_CALL T simd_broadcast_first(T v) {
  return simd::exchange(lily::emulator::op_broadcast_first, v, 0, MSL_SITE);
}
MSL_CALL inline bool simd_is_first() { return simd::lane() == 0; }
struct simd_vote {
  typedef ulong vote_t;
  vote_t mask;
  explicit simd_vote(vote_t v = 0) : mask(v) {}
  explicit operator vote_t() const { return mask; }
  bool all() const { return mask == lily::emulator::current_thread->simdgroup->full; }
  bool any() const { return mask != 0; }
};
MSL_CALL inline simd_vote simd_ballot(bool b) {
  return simd_vote(simd::collect(lily::emulator::op_ballot, (ulong)b, MSL_SITE, &simd::vote));
}
MSL_CALL inline bool simd_any(bool b) {
  return simd::collect(lily::emulator::op_ballot, (ulong)b, MSL_SITE, &simd::vote) != 0;
}
MSL_CALL inline bool simd_all(bool b) {
  return simd::collect(lily::emulator::op_ballot, (ulong)b, MSL_SITE, &simd::vote) ==
         lily::emulator::current_thread->simdgroup->full;
}
#else
template <class T>
T simd_shuffle_and_fill_up(T v, T filling, ushort n);
template <class T>
T simd_shuffle_and_fill_down(T v, T filling, ushort n);
template <class T>
T simd_broadcast_first(T v);
bool simd_is_first();
struct simd_vote {
  typedef ulong vote_t;
  vote_t mask;
  explicit simd_vote(vote_t v = 0) : mask(v) {}
  explicit operator vote_t() const { return mask; }
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool b);
bool simd_any(bool b);
bool simd_all(bool b);
#endif

}  // namespace metal
