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
  // All loads before the first use: one after another they would cost a trip to the L2 each.
  float mine[kMaxExperts / 32];
#pragma unroll
  for (int k = 0; k < kMaxExperts / 32; ++k)
    mine[k] = 32 * k < n_experts ? load_l2(logits + lane + 32 * k) : -INFINITY;
  float largest = -INFINITY;
#pragma unroll
  for (const float x : mine) largest = fmaxf(largest, x);
  scratch->lane_max[lane] = largest;
  warp_sync();
  // The 8th largest of the lanes' maxima: at least 8 logits are not below it, seldom many more.
  int rank = 0;
  const uint32_t my_place = ordered(largest);
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    const uint32_t other = ordered(scratch->lane_max[j]);
    rank += other > my_place || (other == my_place && j < lane);
  }
  const uint32_t eighth = warp_ballot(rank == kTop - 1);
  const uint32_t threshold = shuffle_from(my_place, static_cast<unsigned>(lowest_bit(eighth)));
  int n = 0;
#pragma unroll
  for (int k = 0; k < kMaxExperts / 32; ++k) {
    if (32 * k >= n_experts) break;
    const uint32_t chosen = warp_ballot(ordered(mine[k]) >= threshold);
    if (chosen >> lane & 1) {
      const int at = n + count_bits(chosen & ((1u << lane) - 1));
      scratch->value[at] = mine[k];
      scratch->id[at] = lane + 32 * k;
    }
    n += count_bits(chosen);
  }
  warp_sync();
  for (int c = lane; c < n; c += 32) {
    const uint32_t here = ordered(scratch->value[c]);
    const int id = scratch->id[c];
    int place = 0;
#pragma unroll 8
    for (int j = 0; j < n; ++j) {
      const uint32_t other = ordered(scratch->value[j]);
      place += other > here || (other == here && scratch->id[j] < id);
    }
    if (place < kTop) {
      top->ids[place] = id;
      top->logits[place] = scratch->value[c];
    }
  }
  warp_sync();
  if (lane < kTop) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kTop; ++j) sum += expf(top->logits[j] - top->logits[0]);
    top->weights[lane] = expf(top->logits[lane] - top->logits[0]) / sum;
  }
}

}  // namespace lily::cuda
