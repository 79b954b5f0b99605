// What the delta-net kernels share: gates, convolution of one channel, and the recurrence of one token.
//
// Delta state of a slot and layer: [value head][dv][dk] fp32, so that a column of the state (one dv) is
// contiguous. A column belongs to one simdgroup; lane l holds rows 4 l .. 4 l + 3 of it in a float4.
// Conv state of a slot and layer: [value head][3][384] bf16, oldest row first: the q, k and v channels that
// the value head convolves. The q and k channels of a key head are kept once for each of its value heads, so
// that one threadgroup owns what it updates in place.
#ifndef LILY_METAL_DELTA_H
#define LILY_METAL_DELTA_H

#include "quantised.h"

constant constexpr uint kColumns = 4;  // of a simdgroup

// log(1 + x) for x in [0, 1], accurate for small x.
inline float log_1_plus(float x) {
  const float u = 1.0f + x;
  return u == 1.0f ? x : log(u) * (x / (u - 1.0f));
}

// (18) log decay.
inline float log_decay(float a_log, float dt_bias, float a) {
  const float y = a + dt_bias;
  return -exp(a_log) * (max(y, 0.0f) + log_1_plus(exp(-fabs(y))));
}

// (14) from the four taps, oldest first.
inline float convolve(device const float* w, float m0, float m1, float m2, float m3) {
  return silu(fma(w[3], m3, fma(w[2], m2, fma(w[1], m1, w[0] * m0))));
}

// Convolved channel (of all) that channel c of value head h is.
inline uint channel_of(uint h, uint c, uint n_key_heads) {
  if (c < 2 * kDeltaHead)
    return (c / kDeltaHead) * n_key_heads * kDeltaHead + h / 2 * kDeltaHead + c % kDeltaHead;
  return 2 * n_key_heads * kDeltaHead + h * kDeltaHead + (c - 2 * kDeltaHead);
}

inline ulong conv_index(uint slot, uint slot_words, uint h, uint row, uint c) {
  return ulong(slot) * slot_words * (kWordBytes / 2) + (h * (kTaps - 1) + row) * kMixerChannels + c;
}
inline ulong state_index(uint slot, uint slot_words, uint row) {
  return ulong(slot) * slot_words * (kWordBytes / 4) + row * kDeltaHead;
}

// (16) the lane's 4 values of a normalised head.
inline float4 l2_normalised(float4 x, float scale) {
  return x * (rsqrt(simd_sum(dot(x, x)) + kEpsilon) * scale);
}
constant constexpr float kQueryScale = 0.08838834764831845f;  // 128^-1/2

// (19) one token and one column; returns the output. All lanes of the simdgroup call it.
inline float delta_step(thread float4& column, float4 q, float4 k, float v, float decay, float beta) {
  column = column * decay;
  const float delta = beta * (v - simd_sum(dot(k, column)));
  column = column + k * delta;
  return simd_sum(dot(q, column));
}

inline float4 load_column(device const float* state, int slot, uint slot_words, uint h, uint dv, uint lane) {
  if (slot < 0) return float4(0.0f);
  return *(device const float4*)(state + state_index(uint(slot), slot_words, h * kDeltaHead + dv) + lane * 4);
}

inline void store_column(device float* state, uint slot, uint slot_words, uint h, uint dv, uint lane,
                         float4 column) {
  *(device float4*)(state + state_index(slot, slot_words, h * kDeltaHead + dv) + lane * 4) = column;
}

#endif
