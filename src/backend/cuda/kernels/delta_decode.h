// The Gated DeltaNet mixer between its projections for decode rows, each of its own sequence: causal
// convolution and SiLU, L2 norms, gates, one step of the recurrence, gated norm. Equations (14)-(20).
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cuda/kernels/host_types.h"
#include "backend/cuda/kernels/step.h"

namespace lily::cuda {

struct DeltaDecode {
  const uint16_t* qkv = nullptr;  // [rows, channels] at stride: q heads, k heads, v heads, before convolution
  const uint16_t* z = nullptr;    // [rows, value width] at stride
  const uint16_t *b = nullptr, *a = nullptr;  // [rows, value heads] at stride
  int64_t stride = 0;
  const uint16_t* conv = nullptr;  // [channels][4] bf16
  const float* a_log = nullptr;    // [value heads]
  const float* dt_bias = nullptr;
  const float* norm = nullptr;    // [128]
  int n_key_heads = 0, rows = 1;  // value heads: twice as many
  float epsilon = 1e-6f;
  uint16_t* conv_state = nullptr;  // [slot][3][channels] of this layer at conv_slot_stride, oldest row first
  int64_t conv_slot_stride = 0;    // elements
  float* delta_state = nullptr;    // [slot][value head][column][row] of this layer at delta_slot_stride
  int64_t delta_slot_stride = 0;
  // A source that is not the destination is read for the last time, and need not stay in the L2.
  bool evict_source = true;
  StepView step{};
  bool state_in_flight =
      false;              // the kernel in front writes the state that this one reads (rows of one sequence)
  uint16_t* y = nullptr;  // [rows, value width] bf16
};
void launch_delta_decode(const DeltaDecode& p, cudaStream_t stream);

}  // namespace lily::cuda
