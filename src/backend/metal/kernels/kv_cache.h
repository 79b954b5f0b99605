// Rows of the KV cache, in bf16 or in 8 bits (kKvBits 16 or 8).
//
// Each KV head has a plane of 64 tokens in a block's K, and one in its V. bf16: [64][256] values. 8 bits:
// codes [64][256], then fp16 scales [64][4] of groups of 64 values, which read as scale * code
// (docs/numerics.md, "An 8-bit KV cache"; quantised to the bits that model/int8_group.h defines). A simdgroup
// has a row: lane l has values 8 l .. 8 l + 7, a group is eight lanes.
#ifndef LILY_METAL_KV_CACHE_H
#define LILY_METAL_KV_CACHE_H

#include "quantised.h"

constant constexpr uint kLaneDims = 8;  // of a head, for each lane of a simdgroup
constant constexpr uint kPlaneValues = kCacheTokens * kAttentionHead;
constant constexpr uint kRowScales = kAttentionHead / kGroup;

// Where the plane of a head begins in the block that a position lies in: bytes.
template <int kKvBits>
inline ulong plane_at(device const uint* blocks, uint first_block, uint position, uint kv_head,
                      uint block_words) {
  const uint bytes = kKvBits == 16 ? kPlaneValues * 2 : kPlaneValues + kCacheTokens * kRowScales * 2;
  return ulong(blocks[first_block + position / kCacheTokens]) * block_words * kWordBytes + kv_head * bytes;
}

// Values 8 part .. 8 part + 7 of a row without their scale, which is returned. Coalesced: one read, adjacent
// lanes adjacent bytes (D5); else its ablation, a read for each value.
template <int kKvBits, bool kCoalesced>
inline float read_cached(device const uchar* plane, uint token, uint part, thread float* out) {
  const uint first = token * kAttentionHead + part * kLaneDims;
  if (kKvBits == 16) {
    device const bfloat* values = (device const bfloat*)plane + first;
    if (kCoalesced) {
      unpack_bf16(*(device const uint4*)values, out);
    } else {
      for (uint i = 0; i < kLaneDims; ++i) out[i] = float(values[i]);
    }
    return 1.0f;
  }
  if (kCoalesced) {
    const uint2 words = *(device const uint2*)(plane + first);
    for (uint i = 0; i < kLaneDims; ++i) out[i] = float(int(words[i / 4] << (24 - 8 * (i % 4))) >> 24);
  } else {
    for (uint i = 0; i < kLaneDims; ++i) out[i] = float(int(uint(plane[first + i]) << 24) >> 24);
  }
  device const half* scales = (device const half*)(plane + kPlaneValues);
  return float(scales[token * kRowScales + part / (kGroup / kLaneDims)]);
}

template <int kKvBits, bool kCoalesced>
inline void load_cached(device const uchar* plane, uint token, uint lane, thread float* out) {
  const float scale = read_cached<kKvBits, kCoalesced>(plane, token, lane, out);
  if (kKvBits == 8)
    for (uint i = 0; i < kLaneDims; ++i) out[i] *= scale;
}

// The row's values become codes; the scale of the lane's group is returned. All lanes of the simdgroup call
// it. Magnitudes are compared as bits: those of infinities and NaN are the largest.
inline half to_codes(thread float* values) {
  constexpr uint kInfinity = 0x7f800000u;
  uint largest = 0;
  for (uint i = 0; i < kLaneDims; ++i) largest = max(largest, as_type<uint>(values[i]) & 0x7fffffffu);
  for (ushort other = 1; other < kGroup / kLaneDims; other *= 2)
    largest = max(largest, simd_shuffle_xor(largest, other));
  const bool is_finite = largest < kInfinity;
  const half scale = half(clamp(as_type<float>(largest) / 127.0f, 7.62939453125e-6f, 65504.0f));
  const float step = float(scale);
  for (uint i = 0; i < kLaneDims; ++i)
    values[i] = is_finite ? rint(clamp(values[i] / step, -127.0f, 127.0f)) : 0.0f;
  return is_finite ? scale : as_type<half>(ushort(0x7e00));
}

// The row as the cache will hold it. All lanes of the simdgroup call it.
template <int kKvBits>
inline void as_cached(thread float* values) {
  if (kKvBits == 16) {
    for (uint i = 0; i < kLaneDims; ++i) values[i] = float(bfloat(values[i]));
  } else {
    const float scale = float(to_codes(values));
    for (uint i = 0; i < kLaneDims; ++i) values[i] *= scale;
  }
}

// The row to the cache; what the cache reads as is stored as the same bits. `values` are lost. All lanes of
// the simdgroup call it.
template <int kKvBits>
inline void store_cached(device uchar* plane, uint token, uint lane, thread float* values) {
  const uint first = token * kAttentionHead + lane * kLaneDims;
  if (kKvBits == 16) {
    device bfloat* to = (device bfloat*)plane + first;
    for (uint i = 0; i < kLaneDims; ++i) to[i] = bfloat(values[i]);
  } else {
    const half scale = to_codes(values);
    uint2 words = uint2(0u);
    for (uint i = 0; i < kLaneDims; ++i) words[i / 4] |= (uint(int(values[i])) & 255u) << (8 * (i % 4));
    *(device uint2*)(plane + first) = words;
    device half* scales = (device half*)(plane + kPlaneValues);
    if (lane % (kGroup / kLaneDims) == 0) scales[token * kRowScales + lane / (kGroup / kLaneDims)] = scale;
  }
}

// The same of bf16 values.
template <int kKvBits>
inline void store_cached(device uchar* plane, uint token, uint lane, device const bfloat* row) {
  float values[8];
  unpack_bf16(*(device const uint4*)(row + lane * kLaneDims), values);
  store_cached<kKvBits>(plane, token, lane, values);
}

#endif
