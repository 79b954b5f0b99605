// What both attention kernels of prefill do with the 16 rows of a warp (row = 8 token + head): softmax of a
// block of 64 keys in accumulator order, and the way out.
#pragma once

#include "backend/cuda/kernels/prefill_ops.h"
#include "backend/cuda/prefill_attention.h"

namespace lily::cuda {

constexpr float kScale = 1.4426950408889634f / 16.0f;  // log2(e) / sqrt(256)

struct RowState {
  float maximum[2], sum[2];  // of rows g and g + 8 of the warp; sum of this lane's columns
};

// Scores become probabilities relative to the new maximum; factor is what older sums and outputs shrink by.
__device__ __forceinline__ void soften(float (&s)[32], RowState& state, float (&factor)[2], int first_key,
                                       const int (&last_key)[2], bool masked) {
  const int t = static_cast<int>(lane_id()) % 4;
  if (masked) {
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if (first_key + i / 4 * 8 + 2 * t + i % 2 > last_key[i / 2 % 2]) s[i] = -INFINITY;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = state.maximum[half];
#pragma unroll
    for (int j = 0; j < 8; ++j) top = fmaxf(top, fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
    top = fmaxf(top, shuffle_xor(top, 1));
    top = fmaxf(top, shuffle_xor(top, 2));
    factor[half] = exp2_fast((state.maximum[half] - top) * kScale);
    state.maximum[half] = top;
    const float offset = top * kScale;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[4 * j + 2 * half + e];
        x = exp2_fast(fmaf(x, kScale, -offset));
        sum += x;
      }
    state.sum[half] = fmaf(state.sum[half], factor[half], sum);
  }
}

__device__ __forceinline__ void to_operand(uint32_t (&probabilities)[4][4], const float (&s)[32]) {
#pragma unroll
  for (int step = 0; step < 4; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // register i: row half i % 2, key half i / 2
      const int at = 8 * step + i / 2 * 4 + i % 2 * 2;
      probabilities[step][i] = bf16_pair(s[at], s[at + 1]);
    }
}

// Outputs of the warp's rows through their own places of Q (image quarters of quarter_bytes) to memory, with
// the gate.
__device__ __forceinline__ void store_rows(const AttentionArgs& p, int kv_head, int first_token, int n_tokens,
                                           uint32_t q, uint32_t quarter_bytes, int own_row,
                                           const float (&o)[128], const RowState& state) {
  const int lane = static_cast<int>(lane_id()), g = lane / 4, t = lane % 4;
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = state.sum[half];
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    factor[half] = 1.0f / sum;
  }
  warp_sync();
#pragma unroll
  for (int j = 0; j < 32; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<uint32_t*>(shared_at(
          swizzled(q + static_cast<uint32_t>(j / 8) * quarter_bytes, own_row + g + 8 * half, j % 8) +
          4u * static_cast<uint32_t>(t))) =
          bf16_pair(o[4 * j + 2 * half] * factor[half], o[4 * j + 2 * half + 1] * factor[half]);
  warp_sync();
  for (int i = 0; i < 16; ++i) {
    const int row = own_row + i, row_token = row / kQueryGroup;
    if (row_token >= n_tokens) break;
    const int64_t at = first_token + row_token;
    const int head = kv_head * kQueryGroup + row % kQueryGroup;
    float x[8], gate[8];
    unpack8(*reinterpret_cast<const uint4*>(
                shared_at(swizzled(q + static_cast<uint32_t>(lane / 8) * quarter_bytes, row, lane % 8))),
            x);
    unpack8(
        reinterpret_cast<const uint4*>(p.q_gate + at * p.q_gate_stride + (2 * head + 1) * kHeadCols)[lane],
        gate);
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] *= sigmoid(gate[e]);
    reinterpret_cast<uint4*>(p.y + (at * p.n_q_heads + head) * kHeadCols)[lane] = pack8(x);
  }
}

}  // namespace lily::cuda
