// The choice of experts (22) (23) by one simdgroup.
#ifndef LILY_METAL_ROUTER_H
#define LILY_METAL_ROUTER_H

#include "quantised.h"

constant constexpr uint kMaxExpertsPerLane = 32;

// Lane j < 8 gets the expert with the j-th largest logit (lower index on ties) and its weight: exp(l - max)
// over the sum of the 8, which equals p / sum(p). A lane looks through every 32nd expert. fp32.
inline uint top_experts(device const float* logits, uint n_experts, uint lane, thread float& weight) {
  uint taken = 0;  // a bit for each of the lane's experts
  float top = 0.0f;
  float chosen = 0.0f;
  uint id = 0;
  for (uint j = 0; j < kTopK; ++j) {
    float best = -3.4e38f;
    uint index = 0xffffffffu;
    for (uint i = 0; i < kMaxExpertsPerLane; ++i) {
      const uint e = i * 32 + lane;
      if (e >= n_experts) break;
      if ((taken >> i & 1u) == 0 && logits[e] > best) {
        best = logits[e];
        index = e;
      }
    }
    const float winner = simd_max(best);
    // Only NaN leaves no winner; an id must be valid even then.
    const uint expert = min(simd_min(best == winner ? index : 0xffffffffu), n_experts - 1);
    if (expert == index) taken |= 1u << (expert / 32);
    if (j == 0) top = winner;
    if (lane == j) {
      chosen = winner;
      id = expert;
    }
  }
  weight = lane < kTopK ? exp(chosen - top) : 0.0f;
  weight /= simd_sum(weight);
  return id;
}

#endif
