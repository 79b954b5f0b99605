// What the shim promises of the language, as numbers that language_test.cc knows.
#include <metal_atomic>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

kernel void vectors(device float* o [[buffer(0)]], device packed_float3* packed [[buffer(1)]]) {
  float4 a(1.0f, 2.0f, 3.0f, 4.0f);
  a.xy = a.wz;  // 4 3 3 4
  o[0] = a.x;
  o[1] = a.y;
  a.zw += float2(1.0f, 2.0f);  // 4 3 4 6
  o[2] = dot(a, float4(1.0f));
  const float3 b = a.wzy;
  o[3] = b.x * 100.0f + b.y * 10.0f + b.z;
  o[4] = float(sizeof(float3)) + float(sizeof(packed_float3)) / 100.0f;
  packed[1] = b;
  const float3 c = float3(packed[1]) * 2.0f;
  o[5] = c.z;
  const uint2 u = as_type<uint2>(ushort4(1, 2, 3, 4));
  o[6] = float(u.y >> 16);
  o[7] = float(as_type<uint>(1.0f) >> 23);
  o[8] = all(a == float4(4.0f, 3.0f, 4.0f, 6.0f)) ? 1.0f : 0.0f;
  const float4 d(float2(1.0f, 2.0f), b.xy);
  o[9] = d.z;
  o[10] = max(a, d).x + min(a, d).w + clamp(7.5f, 0.0f, 5.0f) + select(1.0f, 2.0f, true);
  o[11] = (2.0f - a).y + (a.xy * a.zw).y;
}

kernel void small_floats(device float* o [[buffer(0)]], device bfloat* b [[buffer(1)]],
                         device half* h [[buffer(2)]]) {
  b[0] = bfloat(1.00390625f);  // halfway between 1 and the next: to even
  b[1] = bfloat(1.01171875f);  // halfway, the even neighbour is above
  o[0] = float(b[0]);
  o[1] = float(b[1]);
  h[0] = half(2049.0f);
  o[2] = float(h[0]);
  h[1] = half(70000.0f);
  o[3] = isinf(float(h[1])) ? 1.0f : 0.0f;
  const bfloat s = b[0] + bfloat(0.00390625f);  // rounded to bfloat
  o[4] = float(s);
  o[5] = b[0] + 0.00390625f;  // float arithmetic
  o[6] = float(h[0] * h[0]) > 60000.0f ? 1.0f : 0.0f;
  o[7] = isnan(float(bfloat(NAN))) ? 1.0f : 0.0f;
  bfloat4 v = bfloat4(float4(1.0f, 2.0f, 3.0f, 4.0f));
  o[8] = float(v.w);
}

kernel void integers(device uint* o [[buffer(0)]]) {
  o[0] = mulhi(0x80000000u, 6u);
  o[1] = popcount(0xf0f0u);
  o[2] = clz(0x00010000u);
  o[3] = ctz(0u);
  o[4] = rotate(0x80000001u, 4u);
  o[5] = extract_bits(0xabcd1234u, 8u, 12u);
  o[6] = insert_bits(0xffffffffu, 0u, 4u, 8u);
  o[7] = reverse_bits(1u);
  o[8] = numeric_limits<uint>::max();
  o[9] = uint(numeric_limits<short>::min() + 40000);
}

// One simdgroup.
kernel void simdgroup_functions(device uint* o [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  device uint* row = o + lane * 16u;
  row[0] = simd_sum(lane);
  row[1] = simd_max(lane * 3u);
  row[2] = simd_prefix_exclusive_sum(lane);
  row[3] = simd_prefix_inclusive_sum(1u);
  row[4] = simd_shuffle(lane, ushort(7));
  row[5] = simd_shuffle_xor(lane, ushort(5));
  row[6] = simd_shuffle_down(lane, ushort(2));
  row[7] = simd_shuffle_up(lane, ushort(2));
  row[8] = simd_broadcast(lane, ushort(31));
  row[9] = simd_broadcast_first(lane + 9u);
  row[10] = simd_any(lane == 31u) ? 1u : 0u;
  row[11] = simd_all(lane < 31u) ? 1u : 0u;
  row[12] = uint(simd_vote::vote_t(simd_ballot(lane % 2u == 0u)));
  row[13] = simd_shuffle_rotate_down(lane, ushort(1));
  row[14] = simd_shuffle_and_fill_up(lane, 100u + lane, ushort(1));
  row[15] = quad_sum(lane);
}

// 8x8 matrices, one simdgroup: d = a * b + c with b stored transposed.
kernel void matrix_product(device const bfloat* a [[buffer(0)]], device const half* b [[buffer(1)]],
                           device const float* c [[buffer(2)]], device float* d [[buffer(3)]]) {
  simdgroup_bfloat8x8 ma;
  simdgroup_half8x8 mb;
  simdgroup_float8x8 mc, md;
  simdgroup_load(ma, a, 8);
  simdgroup_load(mb, b, 8, ulong2(0), true);
  simdgroup_load(mc, c, 8);
  simdgroup_multiply_accumulate(md, ma, mb, mc);
  simdgroup_store(md, d, 8);
}

// Grid and group positions in three dimensions.
kernel void positions(device uint* o [[buffer(0)]], uint3 at [[thread_position_in_grid]],
                      uint3 size [[threads_per_grid]], uint3 group [[threadgroup_position_in_grid]],
                      ushort3 within [[thread_position_in_threadgroup]],
                      uint index [[thread_index_in_threadgroup]]) {
  o[(at.z * size.y + at.y) * size.x + at.x] =
      group.x + 10u * group.y + 100u * group.z + 1000u * within.x + 10000u * within.y + 100000u * index;
}

kernel void atomics(device atomic_uint* o [[buffer(0)]], device atomic_float* f [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) {
  atomic_fetch_add_explicit(&o[0], i, memory_order_relaxed);
  atomic_fetch_max_explicit(&o[1], i, memory_order_relaxed);
  atomic_fetch_or_explicit(&o[2], 1u << (i & 31u), memory_order_relaxed);
  atomic_fetch_add_explicit(f, 0.5f, memory_order_relaxed);
  uint expected = atomic_load_explicit(&o[3], memory_order_relaxed);
  while (!atomic_compare_exchange_weak_explicit(&o[3], &expected, expected + 2u, memory_order_relaxed,
                                                memory_order_relaxed)) {
  }
}
