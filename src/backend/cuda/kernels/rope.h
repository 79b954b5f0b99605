// (7) (8) RMSNorm of one head of 256 and rotation of its first 64 values, by one warp.
#pragma once

#include "backend/cuda/kernels/device_ops.h"

namespace lily::cuda {

// A lane's part of a head norm's weight.
struct HeadWeight {
  float part[8];
};
__device__ __forceinline__ HeadWeight load_head_weight(const float* weight) {
  HeadWeight w;
#pragma unroll
  for (int i = 0; i < 8; ++i) w.part[i] = weight[8 * lane_id() + static_cast<unsigned>(i)];
  return w;
}

// cos and sin of the angles that a lane needs (lanes 0 .. 7). rope: of the row's 32 angles.
struct HeadAngles {
  float2 part[8];
};
__device__ __forceinline__ HeadAngles load_head_angles(const float2* rope) {
  HeadAngles a{};
  if (lane_id() < 8)
#pragma unroll
    for (unsigned i = 0; i < 8; ++i) a.part[i] = rope[8 * (lane_id() & 3) + i];
  return a;
}

// bits: columns 8 l .. 8 l + 7 of a head in lane l, as bf16; returns the same of the result.
__device__ __forceinline__ uint4 norm_and_rotate(uint4 bits, const HeadWeight& weight, float epsilon,
                                                 const HeadAngles& angles) {
  const int lane = static_cast<int>(lane_id());
  float x[8] = {bf16_low(bits.x), bf16_high(bits.x), bf16_low(bits.y), bf16_high(bits.y),
                bf16_low(bits.z), bf16_high(bits.z), bf16_low(bits.w), bf16_high(bits.w)};
  float square = 0;
#pragma unroll
  for (const float v : x) square = fmaf(v, v, square);
  const float r = reciprocal_sqrt(warp_sum(square) / 256.0f + epsilon);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = x[i] * r * weight.part[i];
    // Lanes 0 .. 3 hold columns 0 .. 31, lanes 4 .. 7 their partners 32 .. 63.
    const float partner = shuffle_xor(x[i], 4);
    if (lane < 8) {
      const float2 angle = angles.part[i];
      x[i] = lane < 4 ? x[i] * angle.x - partner * angle.y : partner * angle.y + x[i] * angle.x;
    }
  }
  return make_uint4(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]),
                    bf16_pair(x[6], x[7]));
}
__device__ __forceinline__ uint4 norm_and_rotate(const uint16_t* head, const float* weight, float epsilon,
                                                 const float2* rope) {
  return norm_and_rotate(load_l2(reinterpret_cast<const uint4*>(head) + lane_id()), load_head_weight(weight),
                         epsilon, load_head_angles(rope));
}

}  // namespace lily::cuda
