// Every op one at a time, without fusion: what chunks take where each value must be written, and the
// ablations.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cuda/kernels/host_types.h"
#include "backend/cuda/kernels/kv_layout.h"
#include "backend/cuda/kernels/step.h"

namespace lily::cuda {

// Head norms and rotation of q and k, append of k and v: rows of any sequences.
struct PrepareHeads {
  const uint16_t* q_gate = nullptr;           // [rows, heads * 512] at stride
  const uint16_t *k = nullptr, *v = nullptr;  // [rows, kv heads * 256] at stride
  int64_t stride = 0;
  const float *q_norm = nullptr, *k_norm = nullptr;
  float epsilon = 1e-6f;
  int n_q_heads = 0, rows = 1;
  KvCache cache;
  StepView step{};
  uint16_t* q = nullptr;  // [rows, heads * 256]
};
void launch_prepare_heads(const PrepareHeads& p, cudaStream_t stream);

struct RouterTopRows {
  const float* logits;  // [rows, stride]
  int64_t stride;
  int n_experts, rows;
  int32_t* ids;    // [rows, 8]
  float* weights;  // [rows, 8]
};
void launch_router_top(const RouterTopRows& p, cudaStream_t stream);

}  // namespace lily::cuda
