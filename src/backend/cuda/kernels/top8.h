// (22) (23) The router's choice, by one warp: the 8 largest of n_experts fp32 logits (a multiple of 32, at most 512;
// larger logit, then lower index), and their softmax weights renormalised over the 8. The softmax over all experts
// cancels in the renormalisation, so only the 8 exponentials are taken.
#pragma once

#include "backend/cuda/kernels/device_ops.h"

namespace lily::cuda {

inline constexpr int kTop = 8;
inline constexpr int kMaxExperts = 512;

struct Top8 {
  int32_t ids[kTop];     // by falling weight
  float weights[kTop];
  float logits[kTop];
};

struct Top8Scratch {
  float lane_max[32];
  float value[kMaxExperts];
  int32_t id[kMaxExperts];
};

// Floats as integers of the same order; NaN of either sign sorts lowest so that a choice always exists.
__device__ __forceinline__ uint32_t ordered(float x) {
  uint32_t b;
  memcpy(&b, &x, 4);
  if ((b & 0x7fffffffu) > 0x7f800000u) return 0;
  return b & 0x80000000u ? ~b : b | 0x80000000u;
}

// logits: shared or global memory. The result is complete in `top` (shared) after the caller's next barrier.
__device__ __forceinline__ void select_top8(const float* logits, int n_experts, Top8* top, Top8Scratch* scratch) {
  const int lane = static_cast<int>(lane_id());
  const int per_lane = n_experts / 32;
  float largest = -INFINITY;
  for (int k = 0; k < per_lane; ++k) largest = fmaxf(largest, load_l2(logits + lane + 32 * k));
  scratch->lane_max[lane] = largest;
  warp_sync();
  // The 8th largest of the lanes' maxima: at least 8 logits are not below it, seldom many more.
  int rank = 0;
  for (int j = 0; j < 32; ++j) {
    const float other = scratch->lane_max[j];
    rank += ordered(other) > ordered(largest) || (ordered(other) == ordered(largest) && j < lane);
  }
  const uint32_t eighth = warp_ballot(rank == kTop - 1);
  int source = 0;
  while (!(eighth >> source & 1)) ++source;
  const uint32_t threshold = ordered(scratch->lane_max[source]);
  int n = 0;
  for (int k = 0; k < per_lane; ++k) {
    const float x = load_l2(logits + lane + 32 * k);
    const uint32_t chosen = warp_ballot(ordered(x) >= threshold);
    if (chosen >> lane & 1) {
      const int at = n + count_bits(chosen & ((1u << lane) - 1));
      scratch->value[at] = x;
      scratch->id[at] = lane + 32 * k;
    }
    n += count_bits(chosen);
  }
  warp_sync();
  for (int c = lane; c < n; c += 32) {
    const uint32_t mine = ordered(scratch->value[c]);
    const int id = scratch->id[c];
    int place = 0;
    for (int j = 0; j < n; ++j) {
      const uint32_t other = ordered(scratch->value[j]);
      place += other > mine || (other == mine && scratch->id[j] < id);
    }
    if (place < kTop) {
      top->ids[place] = id;
      top->logits[place] = scratch->value[c];
    }
  }
  warp_sync();
  if (lane < kTop) {
    float sum = 0;
    for (int j = 0; j < kTop; ++j) sum += expf(top->logits[j] - top->logits[0]);
    top->weights[lane] = expf(top->logits[lane] - top->logits[0]) / sum;
  }
}

}  // namespace lily::cuda
