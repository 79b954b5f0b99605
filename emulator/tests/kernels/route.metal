// Groups assignments of tokens to experts by expert: histogram, prefix sum, scatter. The order within an
// expert is not defined. Also the list of blocks of at most `block` rows, and its length as arguments of an
// indirect dispatch.
#include <metal_atomic>
#include <metal_stdlib>
using namespace metal;

struct RouteParams {
  uint pairs;
  uint experts;
  uint block;
};

kernel void route_histogram(device const uint* expert [[buffer(0)]], device atomic_uint* count [[buffer(1)]],
                            constant RouteParams& p [[buffer(2)]], uint gid [[thread_position_in_grid]],
                            uint lid [[thread_index_in_threadgroup]], uint tgs [[threads_per_threadgroup]]) {
  threadgroup atomic_uint local_count[256];
  for (uint e = lid; e < p.experts; e += tgs)
    atomic_store_explicit(&local_count[e], 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (gid < p.pairs) atomic_fetch_add_explicit(&local_count[expert[gid]], 1u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint e = lid; e < p.experts; e += tgs) {
    const uint c = atomic_load_explicit(&local_count[e], memory_order_relaxed);
    if (c) atomic_fetch_add_explicit(&count[e], c, memory_order_relaxed);
  }
}

// One threadgroup of 256 threads. Writes offsets[0..experts], the block map
// (expert, first pair) and the indirect dispatch size; resets the cursors.
kernel void route_scan(device const uint* count [[buffer(0)]], device uint* offsets [[buffer(1)]],
                       device uint* cursor [[buffer(2)]], device uint2* block_map [[buffer(3)]],
                       device uint* indirect [[buffer(4)]], constant RouteParams& p [[buffer(5)]],
                       uint lid [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                       uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint2 part[8];
  const uint c = lid < p.experts ? count[lid] : 0u;
  const uint nb = (c + p.block - 1) / p.block;
  const uint2 excl(simd_prefix_exclusive_sum(c), simd_prefix_exclusive_sum(nb));
  if (lane == 31) part[sg] = excl + uint2(c, nb);
#ifndef WITHOUT_THREADGROUP_BARRIER
  threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
  uint2 base = uint2(0u);
  for (uint i = 0; i < sg; i++) base += part[i];
  const uint2 at = base + excl;
  if (lid < p.experts) {
    offsets[lid] = at.x;
    cursor[lid] = at.x;
    for (uint b = 0; b < nb; b++) block_map[at.y + b] = uint2(lid, at.x + b * p.block);
    if (lid == p.experts - 1) {
      offsets[p.experts] = at.x + c;
      indirect[0] = at.y + nb;
      indirect[1] = 1u;
      indirect[2] = 1u;
    }
  }
}

kernel void route_scatter(device const uint* expert [[buffer(0)]], device atomic_uint* cursor [[buffer(1)]],
                          device uint* pair_of [[buffer(2)]], constant RouteParams& p [[buffer(3)]],
                          uint gid [[thread_position_in_grid]]) {
  if (gid >= p.pairs) return;
  const uint at = atomic_fetch_add_explicit(&cursor[expert[gid]], 1u, memory_order_relaxed);
  pair_of[at] = gid;
}

// One threadgroup a block: the sum of its rows' values.
kernel void route_block_sum(device const uint2* block_map [[buffer(0)]],
                            device const uint* offsets [[buffer(1)]],
                            device const uint* pair_of [[buffer(2)]],
                            device const float* values [[buffer(3)]], device float* sums [[buffer(4)]],
                            constant RouteParams& p [[buffer(5)]],
                            uint block [[threadgroup_position_in_grid]],
                            uint lane [[thread_index_in_simdgroup]]) {
  const uint2 at = block_map[block];
  const uint end = min(at.y + p.block, offsets[at.x + 1]);
  float sum = 0.0f;
  for (uint i = at.y + lane; i < end; i += 32) sum += values[pair_of[i]];
  sum = simd_sum(sum);
  if (lane == 0) sums[block] = sum;
}
