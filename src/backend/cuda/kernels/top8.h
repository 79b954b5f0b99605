// (22) (23) The router's choice, by one block: the 8 largest of n_experts fp32 logits (a multiple of 32, at
// most 512; larger logit, then lower index), and their softmax weights renormalised over the 8. The softmax
// over all experts cancels in the renormalisation, so only the 8 exponentials are taken.
//
// Each warp ranks 32 logits by shuffles and keeps 8; the 8 n_warps that remain are ranked against each other.
// One warp alone would take several times as long: its instructions wait for one another.
#pragma once

#include "backend/cuda/kernels/device_ops.h"

namespace lily::cuda {

inline constexpr int kTop = 8;
inline constexpr int kMaxExperts = 512;

struct Top8 {
  int32_t ids[kTop];  // by falling weight
  float weights[kTop];
  float logits[kTop];
};

struct Top8Scratch {
  uint32_t key[kMaxExperts / 32 * kTop];
  int32_t id[kMaxExperts / 32 * kTop];
};

// Floats as integers of the same order; NaN of either sign sorts lowest so that a choice always exists.
__device__ __forceinline__ uint32_t ordered(float x) {
  uint32_t b;
  memcpy(&b, &x, 4);
  if ((b & 0x7fffffffu) > 0x7f800000u) return 0;
  return b & 0x80000000u ? ~b : b | 0x80000000u;
}

__device__ __forceinline__ float from_ordered(uint32_t key) {
  const uint32_t b = key & 0x80000000u ? key & 0x7fffffffu : ~key;
  float x;
  memcpy(&x, &b, 4);
  return x;
}

// The weight of choice i: its share of the softmax over the 8.
__device__ __forceinline__ float top8_weight(const Top8& top, int i) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kTop; ++j) sum += expf(top.logits[j] - top.logits[0]);
  return expf(top.logits[i] - top.logits[0]) / sum;
}

// By all threads of a block of at least n_experts; two barriers. Ids and logits of `top` (shared) are
// complete on return; its weights are left to those who want them.
__device__ __forceinline__ void select_top8(const float* logits, int n_experts, Top8* top,
                                            Top8Scratch* scratch) {
  const int thread = static_cast<int>(threadIdx.x), lane = static_cast<int>(lane_id()),
            n_kept = n_experts / 32 * kTop;
  if (thread < n_experts) {  // whole warps
    const uint32_t key = ordered(load_l2(logits + thread));
    int rank = 0;
#pragma unroll
    for (int j = 0; j < 32; ++j) rank += shuffle_from(key, static_cast<unsigned>(j)) + (j < lane) > key;
    if (rank < kTop) {
      scratch->key[thread / 32 * kTop + rank] = key;
      scratch->id[thread / 32 * kTop + rank] = thread;
    }
  }
  block_sync();
  if (thread < n_experts) {  // four threads for each that was kept
    const int kept = thread / 4;
    const uint32_t key = scratch->key[kept];
    int rank = 0;
#pragma unroll 16
    for (int j = thread % 4; j < n_kept; j += 4)
      rank += scratch->key[j] + (j < kept) > key;  // kept in the order of ids where equal
    rank += shuffle_xor(rank, 1);
    rank += shuffle_xor(rank, 2);
    if (rank < kTop && thread % 4 == 0) {
      top->ids[rank] = scratch->id[kept];
      top->logits[rank] = from_ordered(key);
    }
  }
  block_sync();
}

}  // namespace lily::cuda
