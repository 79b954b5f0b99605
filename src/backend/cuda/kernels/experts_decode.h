// The mixture of experts for 1 to 8 rows, in three kernels: router, gate and up projections, down projection.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cuda/kernels/host_types.h"

namespace lily::cuda {

// normed = RMSNorm(x) in bf16; logits = normed * [router; shared gate]^T in fp32.
struct RouterDecode {
  const float* x = nullptr;  // [rows, hidden], fp32 residual
  const float* norm = nullptr;
  float epsilon = 1e-6f;
  int hidden = 0, n_experts = 0, rows = 1;
  // 8-bit weights as the file has them: codes [n, hidden], scales and biases bf16 [n, hidden / 64].
  const uint8_t* router_codes = nullptr;
  const uint16_t *router_scales = nullptr, *router_biases = nullptr;
  const uint8_t* shared_codes = nullptr;  // one row: the shared expert's scalar gate
  const uint16_t *shared_scales = nullptr, *shared_biases = nullptr;
  uint16_t* normed = nullptr;  // [rows, hidden] bf16
  float* logits = nullptr;     // [rows, n_experts + 1]
};
void launch_router_decode(const RouterDecode& p, cudaStream_t stream);

// ids, weights = top 8 of the logits; act[8 t + j] = silu(u G^T) * (u U^T) of expert ids[t][j]; shared
// likewise.
struct ExpertsGateUpDecode {
  const uint16_t* normed = nullptr;  // [rows, hidden] bf16
  const float* logits = nullptr;     // [rows, logits_stride]; null: ids are read instead of chosen
  int64_t logits_stride = 0;
  int32_t* ids = nullptr;    // [rows, 8]
  float* weights = nullptr;  // [rows, 8], written with ids when logits are given
  int hidden = 0, width = 0, shared_width = 0, n_experts = 0, rows = 1;  // shared_width 0: no shared expert
  const unsigned char *gate = nullptr, *up = nullptr;                // [n_experts * width, hidden], packed
  const unsigned char *shared_gate = nullptr, *shared_up = nullptr;  // [shared_width, hidden]
  uint16_t* act = nullptr;                                           // [rows * 8, width] bf16
  uint16_t* shared_act = nullptr;                                    // [rows, shared_width] bf16
  int pairs_per_block = 0, shared_pairs_per_block = 0, routed_blocks = 0, units_per_tile = 0,
      groups_per_unit = 0;  // by the launcher
};
void launch_experts_gate_up_decode(ExpertsGateUpDecode p, int n_sms, cudaStream_t stream);

// residual_out = residual_in + sum_j weights[j] * (act[j] D_ids[j]^T) + sigmoid(shared logit) * (shared_act
// D_s^T).
struct ExpertsDownDecode {
  const uint16_t* act = nullptr;         // [rows * 8, width]
  const uint16_t* shared_act = nullptr;  // [rows, shared_width]
  const float* logits =
      nullptr;  // as above: lets the kernel choose, and fetch weights, before it waits; null: ids
  int64_t logits_stride = 0;
  const int32_t* ids = nullptr;
  const float* weights = nullptr;
  const float* shared_logit = nullptr;  // [rows] at shared_logit_stride
  int64_t shared_logit_stride = 0;
  int hidden = 0, width = 0, shared_width = 0, n_experts = 0, rows = 1;
  const unsigned char* down = nullptr;         // [n_experts * hidden, width], packed
  const unsigned char* shared_down = nullptr;  // [hidden, shared_width]
  const float* residual_in = nullptr;          // [rows, hidden]
  float* residual_out = nullptr;
};
void launch_experts_down_decode(const ExpertsDownDecode& p, cudaStream_t stream);

}  // namespace lily::cuda
