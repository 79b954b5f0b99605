// What the attention kernels share.
//
// The block table gives a segment's blocks; their layout: kv_cache.h. Rotation (8): the angle position *
// theta^(-2 i / 64) is taken modulo a turn in 64-bit integers, so that it is exact to 2^-24 of a turn at any
// position.
#ifndef LILY_METAL_ATTENTION_H
#define LILY_METAL_ATTENTION_H

#include "kv_cache.h"

constant constexpr float kLowest = -3.0e38f;  // finite: masks must survive fast math
constant constexpr float kScoreScale = 0.0625f;
constant constexpr uint kPreparedValues = (kPackedHeads + 1) * kAttentionHead;  // queries and a key

// Cosine and sine of the rotation of a pair.
inline float2 rotation(ulong turns, uint position) {
  const int part = int((turns * ulong(position)) >> 40);  // 24 bits of a turn
  const float turn = float(part >= (1 << 23) ? part - (1 << 24) : part) * 5.9604644775390625e-8f;
  const float angle = turn * 6.283185307179586f;
  return float2(precise::cos(angle), precise::sin(angle));
}

// (7) (8) for one head: the lane's 8 values, normalised and rotated. All lanes of the simdgroup call it.
inline void norm_rotate(device const bfloat* x, device const float* w, constant ulong* turns, uint position,
                        uint lane, thread float* out) {
  float sum = 0.0f;
  for (uint i = 0; i < kLaneDims; ++i) {
    out[i] = float(x[lane * kLaneDims + i]);
    sum = fma(out[i], out[i], sum);
  }
  const float scale = rsqrt(simd_sum(sum) / float(kAttentionHead) + kEpsilon);
  for (uint i = 0; i < kLaneDims; ++i) {
    out[i] = out[i] * scale * w[lane * kLaneDims + i];
    // Lanes 0 to 3 have the first halves of the 32 pairs, lanes 4 to 7 the second.
    const float other = simd_shuffle_xor(out[i], 4);
    if (lane < 8) {
      const float2 turn = rotation(turns[(lane * kLaneDims + i) % kRotaryPairs], position);
      out[i] = lane < 4 ? out[i] * turn.x - other * turn.y : out[i] * turn.x + other * turn.y;
    }
  }
}

// Running softmax of kHeads query heads over the keys that one simdgroup sees, one after another.
template <int kHeads>
struct Running {
  float largest[kHeads];
  float sum[kHeads];
  float o[kHeads][8];

  void clear() {
    for (uint h = 0; h < uint(kHeads); ++h) {
      largest[h] = kLowest;
      sum[h] = 0.0f;
      for (uint i = 0; i < kLaneDims; ++i) o[h][i] = 0.0f;
    }
  }
  void add(uint h, float score, thread const float* v) {
    const float next = max(largest[h], score);
    const float keep = exp(largest[h] - next);
    const float weight = exp(score - next);
    largest[h] = next;
    sum[h] = fma(sum[h], keep, weight);
    for (uint i = 0; i < kLaneDims; ++i) o[h][i] = fma(o[h][i], keep, weight * v[i]);
  }
};

// Keys first, first + step, ... below end for the kHeads heads whose scaled queries are in q.
template <int kHeads, bool kCoalesced, int kKvBits>
inline void scan_keys(device const uchar* k_cache, device const uchar* v_cache, device const uint* blocks,
                      uint first_block, uint kv_head, uint block_words, uint first, uint step, uint end,
                      uint lane, thread const float* q, thread Running<kHeads>& running) {
  for (uint key = first; key < end; key += step) {
    const ulong plane = plane_at<kKvBits>(blocks, first_block, key, kv_head, block_words);
    float k[8];
    float v[8];
    load_cached<kKvBits, kCoalesced>(k_cache + plane, key % kCacheTokens, lane, k);
    load_cached<kKvBits, kCoalesced>(v_cache + plane, key % kCacheTokens, lane, v);
    for (uint h = 0; h < uint(kHeads); ++h) {
      float dot = 0.0f;
      for (uint i = 0; i < kLaneDims; ++i) dot = fma(q[h * kLaneDims + i], k[i], dot);
      running.add(h, simd_sum(dot), v);
    }
  }
}

template <int kHeads>
inline void load_queries(device const bfloat* q, uint lane, thread float* out) {
  for (uint h = 0; h < uint(kHeads); ++h) {
    unpack_bf16(*(device const uint4*)(q + h * kAttentionHead + lane * kLaneDims), out + h * kLaneDims);
    for (uint i = 0; i < kLaneDims; ++i) out[h * kLaneDims + i] *= kScoreScale;
  }
}

// Queries of kHeads heads from first_head on, and the key of the row, normalised and rotated, by simdgroups 0
// .. kHeads: prepared [kHeads + 1][256], rounded as their values would be, the key as the cache will hold it.
// `row` is the row before preparation. The whole threadgroup calls it.
template <int kHeads, int kKvBits>
inline void prepare_row(device const bfloat* row, device const float* q_norm, device const float* k_norm,
                        constant AttentionParams& p, uint position, uint first_head, uint kv_head, uint sg,
                        uint lane, threadgroup float* prepared) {
  if (sg <= uint(kHeads)) {
    const bool is_key = sg == uint(kHeads);
    float values[8];
    norm_rotate(row + (is_key ? p.k_first + kv_head * kAttentionHead
                              : p.gate_first + (first_head + sg) * 2 * kAttentionHead),
                is_key ? k_norm : q_norm, p.turns, position, lane, values);
    if (is_key) as_cached<kKvBits>(values);
    else as_cached<16>(values);
    for (uint i = 0; i < kLaneDims; ++i) prepared[sg * kAttentionHead + lane * kLaneDims + i] = values[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The row's own key and value, which other threadgroups may only just be writing to the cache.
template <int kHeads, int kKvBits>
inline void add_own(threadgroup const float* prepared, device const bfloat* v, uint lane,
                    thread const float* q, thread Running<kHeads>& running) {
  float values[8];
  unpack_bf16(*(device const uint4*)(v + lane * kLaneDims), values);
  as_cached<kKvBits>(values);
  for (uint h = 0; h < uint(kHeads); ++h) {
    float dot = 0.0f;
    for (uint i = 0; i < kLaneDims; ++i)
      dot = fma(q[h * kLaneDims + i], prepared[kHeads * kAttentionHead + lane * kLaneDims + i], dot);
    running.add(h, simd_sum(dot), values);
  }
}

template <int kHeads>
inline void prepared_queries(threadgroup const float* prepared, uint lane, thread float* out) {
  for (uint h = 0; h < uint(kHeads); ++h)
    for (uint i = 0; i < kLaneDims; ++i)
      out[h * kLaneDims + i] = prepared[h * kAttentionHead + lane * kLaneDims + i] * kScoreScale;
}

// The append: by one simdgroup. `plane` is where the planes begin, in K as in V.
template <int kKvBits>
inline void append(threadgroup const float* key, device const bfloat* v, device uchar* k_cache,
                   device uchar* v_cache, ulong plane, uint token, uint lane) {
  float values[8];
  for (uint i = 0; i < kLaneDims; ++i) values[i] = key[lane * kLaneDims + i];
  store_cached<kKvBits>(k_cache + plane, token, lane, values);
  store_cached<kKvBits>(v_cache + plane, token, lane, v);
}

// The result of one head from the simdgroups of the threadgroup, in their order: memory holds
// [simdgroup][256] outputs, largest and sum one value a simdgroup. Value of dimension d; the total weight in
// `total`, the largest score in `top`.
inline float merge(threadgroup const float* memory, threadgroup const float* largest,
                   threadgroup const float* sums, uint n_simdgroups, uint d, thread float& top,
                   thread float& total) {
  top = kLowest;
  for (uint i = 0; i < n_simdgroups; ++i) top = max(top, largest[i]);
  total = 0.0f;
  float value = 0.0f;
  for (uint i = 0; i < n_simdgroups; ++i) {
    const float weight = exp(largest[i] - top);
    total = fma(sums[i], weight, total);
    value = fma(memory[i * kAttentionHead + d], weight, value);
  }
  return value;
}

#endif
