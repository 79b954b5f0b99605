// One seeded fault a kernel, and a control for those that need one. Threadgroups have 64 threads unless
// noted.
#include <metal_stdlib>
using namespace metal;

kernel void copy(device const uint* a [[buffer(0)]], device uint* o [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
  o[i] = a[i];
}

kernel void reads_past_the_end(device const uint* a [[buffer(0)]], device uint* o [[buffer(1)]],
                               uint i [[thread_position_in_grid]]) {
  o[i] = a[i + 1];
}

kernel void divides_by_zero(device uint* o [[buffer(0)]], device const uint* zeros [[buffer(1)]],
                            uint i [[thread_position_in_grid]]) {
  o[i] = i / zeros[i];
}

kernel void writes_before_the_start(device uint* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  device uint* before = o - 4096;
  if (i == 7u) before[i] = i;
}

kernel void writes_weights(device uint* weights [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  if (i == 3u) weights[i] = 7u;
}

struct Pointers {
  device uint* other;
};
kernel void reads_unbound(constant Pointers& p [[buffer(0)]], device uint* o [[buffer(1)]],
                          uint i [[thread_position_in_grid]]) {
  o[i] = p.other[i];
}

// Dispatch several threadgroups of 32.
kernel void counts_without_atomics(device uint* o [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i == 0u) o[0] = o[0] + 1u;
}
kernel void counts_with_atomics(device atomic_uint* o [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i == 0u) atomic_fetch_add_explicit(&o[0], 1u, memory_order_relaxed);
}
kernel void mixes_atomic_and_plain(device atomic_uint* o [[buffer(0)]], device uint* same [[buffer(1)]],
                                   uint i [[thread_index_in_threadgroup]],
                                   uint group [[threadgroup_position_in_grid]]) {
  if (i != 0u) return;
  if (group == 0u) same[0] = 1u;
  else atomic_fetch_add_explicit(&o[0], 1u, memory_order_relaxed);
}

kernel void diverges_between_operations(device uint* o [[buffer(0)]], uint i [[thread_position_in_grid]],
                                        uint lane [[thread_index_in_simdgroup]]) {
  uint s = 0u;
  if (lane < 16u) s = simd_sum(i);
  else s = simd_max(i);
  o[i] = s;
}
kernel void diverges_between_calls(device uint* o [[buffer(0)]], uint i [[thread_position_in_grid]],
                                   uint lane [[thread_index_in_simdgroup]]) {
  uint s = 0u;
  if (lane < 16u) s = simd_sum(i) + 1u;
  else s = simd_sum(i) + 2u;
  o[i] = s;
}
kernel void half_the_lanes_collect(device uint* o [[buffer(0)]], uint i [[thread_position_in_grid]],
                                   uint lane [[thread_index_in_simdgroup]]) {
  uint s = 0u;
  if (lane < 16u) s = simd_sum(i);
  threadgroup_barrier(mem_flags::mem_none);
  o[i] = s;
}

kernel void barrier_for_some(device uint* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup uint t[64];
  t[i] = i;
  if (i < 40u) threadgroup_barrier(mem_flags::mem_threadgroup);
  o[i] = t[i ^ 1u];
}
kernel void barriers_at_two_places(device uint* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  uint s = 0u;
  if (i < 40u) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    s = 1u;
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    s = 2u;
  }
  o[i] = s;
}

kernel void returns_before_collective(device uint* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  if (i == 5u) return;
  o[i] = simd_sum(i);
}
kernel void returns_before_barrier(device uint* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup uint t[64];
  if (i >= 32u) return;
  t[i] = i;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[i] = t[31u - i];
}

kernel void exchanges(device uint* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup uint t[64];
  t[i] = i;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[i] = t[i ^ 33u];
}
kernel void barrier_orders_other_memory(device uint* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup uint t[64];
  t[i] = i;
  threadgroup_barrier(mem_flags::mem_device);
  o[i] = t[i ^ 33u];
}
kernel void no_barrier_before_reuse(device uint* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup uint t[64];
  t[i] = i;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint s = t[i ^ 33u];
  t[i] = s + 1u;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[i] = t[i];
}
kernel void simdgroup_barrier_is_not_enough(device uint* o [[buffer(0)]],
                                            uint i [[thread_position_in_grid]]) {
  threadgroup uint t[64];
  t[i] = i;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  o[i] = t[i ^ 33u];
}
kernel void simdgroup_barrier_is_enough(device uint* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup uint t[64];
  t[i] = i;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  o[i] = t[i ^ 1u];
}

kernel void overruns_threadgroup_array(device uint* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup uint t[64];
  threadgroup uint u[64];
  t[i + 1u] = i;
  u[i] = i;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[i] = u[i] + t[i];
}
kernel void too_much_threadgroup_memory(device uint* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup uint t[8200];
  t[i] = i;
  o[i] = t[i];
}

// Writes bytes [4 i, 4 i + 4), declared or not.
kernel void fill(device uint* o [[buffer(0)]], constant uint& value [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
  o[i] = value;
}
kernel void fill_arguments(device uint* o [[buffer(0)]], constant uint& value [[buffer(1)]]) {
  o[0] = value;
  o[1] = 1u;
  o[2] = 1u;
}

// With argument 2 only if the constant says so.
constant bool kScaled [[function_constant(3)]];
constant uint kFactor [[function_constant(4)]];
kernel void optional_argument(device uint* o [[buffer(0)]],
                              device const uint* scale [[buffer(2), function_constant(kScaled)]],
                              uint i [[thread_position_in_grid]]) {
  o[i] = (kScaled ? scale[i] : 1u) * kFactor;
}

kernel void takes_a_struct(constant uint4& p [[buffer(0)]], device uint4* o [[buffer(1)]],
                           uint i [[thread_position_in_grid]]) {
  o[i] = p;
}

kernel void sums_with_argument_memory(device uint* o [[buffer(0)]], threadgroup uint* t [[threadgroup(0)]],
                                      uint i [[thread_position_in_threadgroup]],
                                      uint n [[threads_per_threadgroup]]) {
  t[i] = i;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint s = 0u;
  for (uint k = 0u; k < n; ++k) s += t[k];
  o[i] = s;
}
