// The products of attention_decode.cu with the 16 keys or values of a slot of its ring.
//
//   bf16: [16][256]
//   int8: [16][256] codes, then [16][4] fp16 scales. Codes are exact in bf16, and scales stay fp32: a key's
//         multiplies what its group of 64 columns adds to a score, a value's its weight.
#pragma once

#include "backend/cuda/kernels/kv_int8.h"
#include "backend/cuda/kernels/kv_layout.h"

namespace lily::cuda {

// score[n][j]: head g, key 8 n + 2 t + j of a slot.
__device__ __forceinline__ void bf16_scores(float (&score)[2][4], const uint4 (&q)[8],
                                            const unsigned char* keys) {
  const int lane = static_cast<int>(lane_id()), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const auto* key = reinterpret_cast<const uint4*>(keys + (8 * n + g) * kHeadCols * 2);
#pragma unroll
    for (float& x : score[n]) x = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const uint4 k = key[4 * c + t];
      mma_16816(score[n], q[c].x, 0, q[c].y, 0, k.x, k.y);
      mma_16816(score[n], q[c].z, 0, q[c].w, 0, k.z, k.w);
    }
  }
}

// high, low: weights of head g and values 8 n + 2 t and the next, in two parts.
__device__ __forceinline__ void add_bf16_outputs(float (&o)[16][4], const uint32_t (&high)[2],
                                                 const uint32_t (&low)[2], const unsigned char* values,
                                                 float shrink0, float shrink1) {
  const int lane = static_cast<int>(lane_id()), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    uint32_t v[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const uint4 x =
          reinterpret_cast<const uint4*>(values + (n / 2 * 8 + 2 * t + n % 2) * kHeadCols * 2)[8 * c + g];
      v[n][0] = x.x;
      v[n][1] = x.y;
      v[n][2] = x.z;
      v[n][3] = x.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float(&acc)[4] = o[4 * c + i];
      acc[0] *= shrink0;
      acc[1] *= shrink1;
      acc[2] *= shrink0;
      acc[3] *= shrink1;
      const uint32_t a0 = pick_halves(v[0][i], v[1][i], false), a1 = pick_halves(v[0][i], v[1][i], true);
      const uint32_t a2 = pick_halves(v[2][i], v[3][i], false), a3 = pick_halves(v[2][i], v[3][i], true);
      mma_16816(acc, a0, a1, a2, a3, high[0], high[1]);
      mma_16816(acc, a0, a1, a2, a3, low[0], low[1]);
    }
  }
}

// ---- int8
// Scales of a pair of rows, 2 i and 2 i + 1: of group c.
struct PairScales {
  uint4 bits;
  template <int kGroup>
  __device__ __forceinline__ float of(int row) const {
    const uint32_t first = kGroup < 2 ? bits.x : bits.y, second = kGroup < 2 ? bits.z : bits.w;
    return f16_value((row == 0 ? first : second) >> (16 * (kGroup % 2)) & 0xffffu);
  }
};
__device__ __forceinline__ PairScales pair_scales(const unsigned char* slot, int first_row) {
  return {
      *reinterpret_cast<const uint4*>(slot + 16 * kHeadCols + first_row * static_cast<int>(kKvScaleBytes))};
}

// The pieces of 8 columns of a query that q[c] of a lane has to hold: those of the 16 columns of a key that
// it reads at once.
__device__ __forceinline__ int int8_query_piece(int c, int t) { return c / 2 * 8 + 2 * t + c % 2; }

template <int kGroup>
__device__ __forceinline__ void add_group_scores(float (&score)[4], const uint4& q0, const uint4& q1,
                                                 const uint4& k, const PairScales& scales) {
  float part[4] = {};
  mma_16816(part, q0.x, 0, q0.y, 0, codes_of_word<0>(k.x), codes_of_word<1>(k.x));
  mma_16816(part, q0.z, 0, q0.w, 0, codes_of_word<0>(k.y), codes_of_word<1>(k.y));
  mma_16816(part, q1.x, 0, q1.y, 0, codes_of_word<0>(k.z), codes_of_word<1>(k.z));
  mma_16816(part, q1.z, 0, q1.w, 0, codes_of_word<0>(k.w), codes_of_word<1>(k.w));
  score[0] = fmaf(part[0], scales.of<kGroup>(0), score[0]);
  score[1] = fmaf(part[1], scales.of<kGroup>(1), score[1]);
}

// score[n][j]: head g, key 8 n + 2 t + j.
__device__ __forceinline__ void int8_scores(float (&score)[2][4], const uint4 (&q)[8],
                                            const unsigned char* keys) {
  const int lane = static_cast<int>(lane_id()), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const auto* key = reinterpret_cast<const uint4*>(keys + (8 * n + g) * kHeadCols);
    const PairScales scales = pair_scales(keys, 8 * n + 2 * t);
#pragma unroll
    for (float& x : score[n]) x = 0;
    add_group_scores<0>(score[n], q[0], q[1], key[t], scales);
    add_group_scores<1>(score[n], q[2], q[3], key[4 + t], scales);
    add_group_scores<2>(score[n], q[4], q[5], key[8 + t], scales);
    add_group_scores<3>(score[n], q[6], q[7], key[12 + t], scales);
  }
}

// Columns 2 kPair and 2 kPair + 1 of a lane's 8: acc = acc * shrink + values * weights.
template <int kPair>
__device__ __forceinline__ void add_pair_outputs(float (&acc)[4], const uint2 (&v)[4],
                                                 const uint32_t (&high)[2], const uint32_t (&low)[2],
                                                 float shrink0, float shrink1) {
  const auto word = [&](int n) { return kPair < 2 ? v[n].x : v[n].y; };
  constexpr int kByte = kPair % 2 * 2;
  acc[0] *= shrink0;
  acc[1] *= shrink1;
  acc[2] *= shrink0;
  acc[3] *= shrink1;
  const uint32_t a0 = codes_of_two<kByte>(word(0), word(1)), a1 = codes_of_two<kByte + 1>(word(0), word(1));
  const uint32_t a2 = codes_of_two<kByte>(word(2), word(3)), a3 = codes_of_two<kByte + 1>(word(2), word(3));
  mma_16816(acc, a0, a1, a2, a3, high[0], high[1]);
  mma_16816(acc, a0, a1, a2, a3, low[0], low[1]);
}

template <int kGroup>
__device__ __forceinline__ void add_group_outputs(float (&o)[16][4], const float (&weight)[2][2],
                                                  const PairScales (&scales)[2], const unsigned char* values,
                                                  float shrink0, float shrink1) {
  const int lane = static_cast<int>(lane_id()), g = lane / 4, t = lane % 4;
  uint32_t high[2], low[2];
#pragma unroll
  for (int n = 0; n < 2; ++n)
    bf16_parts(weight[n][0] * scales[n].of<kGroup>(0), weight[n][1] * scales[n].of<kGroup>(1), high[n],
               low[n]);
  uint2 v[4];
#pragma unroll
  for (int n = 0; n < 4; ++n)
    v[n] = reinterpret_cast<const uint2*>(values + (n / 2 * 8 + 2 * t + n % 2) * kHeadCols)[8 * kGroup + g];
  add_pair_outputs<0>(o[4 * kGroup], v, high, low, shrink0, shrink1);
  add_pair_outputs<1>(o[4 * kGroup + 1], v, high, low, shrink0, shrink1);
  add_pair_outputs<2>(o[4 * kGroup + 2], v, high, low, shrink0, shrink1);
  add_pair_outputs<3>(o[4 * kGroup + 3], v, high, low, shrink0, shrink1);
}

// weight[n][j]: of head g and value 8 n + 2 t + j.
__device__ __forceinline__ void add_int8_outputs(float (&o)[16][4], const float (&weight)[2][2],
                                                 const unsigned char* values, float shrink0, float shrink1) {
  const int t = static_cast<int>(lane_id()) % 4;
  const PairScales scales[2] = {pair_scales(values, 2 * t), pair_scales(values, 8 + 2 * t)};
  add_group_outputs<0>(o, weight, scales, values, shrink0, shrink1);
  add_group_outputs<1>(o, weight, scales, values, shrink0, shrink1);
  add_group_outputs<2>(o, weight, scales, values, shrink0, shrink1);
  add_group_outputs<3>(o, weight, scales, values, shrink0, shrink1);
}

}  // namespace lily::cuda
