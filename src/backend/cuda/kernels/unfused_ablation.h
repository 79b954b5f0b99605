// The simple ops of plan/op.h that the fused kernels stand for, each a kernel of its own, for any number of
// rows of any sequences: what decode takes where fusions are off (D4), and chunks whose every value is
// wanted. Also the mask of the head where the GEMM makes the logits (D1).
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cuda/kernels/host_types.h"
#include "backend/cuda/kernels/kv_layout.h"
#include "backend/cuda/kernels/step.h"

namespace lily::cuda {

// y = silu(gate) * up.
struct SwiGluRows {
  const uint16_t *gate = nullptr, *up = nullptr;  // [rows, width] at stride
  int64_t gate_stride = 0, up_stride = 0;
  int width = 0, rows = 0;
  uint16_t* y = nullptr;  // [rows, width]
};
void launch_swiglu_rows(const SwiGluRows& p, cudaStream_t stream);

// y[8 t + j] = x * W_e^T of expert e = ids[t][j], where x is row t, or row 8 t + j with `by_choice`.
struct ExpertsLinearRows {
  const uint16_t* x = nullptr;  // [rows or 8 rows, in]
  bool by_choice = false;
  const int32_t* ids = nullptr;            // [rows, 8]
  const unsigned char* records = nullptr;  // pack/mma_q4.h, one expert behind the other
  int in = 0, out = 0, rows = 0;
  uint16_t* y = nullptr;                                             // [8 rows, out]
  int tiles_per_block = 0, units_per_tile = 0, groups_per_unit = 0;  // by the launcher
};
void launch_experts_linear_rows(ExpertsLinearRows p, cudaStream_t stream);

// residual_out = residual_in + sum_j weights[t][j] * experts[8 t + j] + sigmoid(shared logit) * shared.
struct ExpertsCombineRows {
  const float* weights = nullptr;     // [rows, 8]
  const uint16_t* experts = nullptr;  // [8 rows, hidden]
  const uint16_t* shared = nullptr;   // [rows, hidden]
  const float* shared_logit = nullptr;
  int64_t shared_logit_stride = 0;
  int hidden = 0, rows = 0;
  const float* residual_in = nullptr;
  float* residual_out = nullptr;
};
void launch_experts_combine_rows(const ExpertsCombineRows& p, cudaStream_t stream);

struct ShortConvRows {
  const uint16_t* x = nullptr;  // [rows, channels] at stride
  int64_t stride = 0;
  const uint16_t* conv = nullptr;  // [channels][4]
  uint16_t* conv_state = nullptr;  // [slot][3][channels] at slot_stride
  int64_t slot_stride = 0;
  int channels = 0, n_segments = 0;
  StepView step{};
  uint16_t* y = nullptr;  // [rows, channels]
};
void launch_short_conv_rows(const ShortConvRows& p, cudaStream_t stream);

struct DeltaPrepareRows {
  const uint16_t* mixed = nullptr;            // [rows, q heads and k heads first] at mixed_stride
  const uint16_t *b = nullptr, *a = nullptr;  // [rows, value heads] at gate_stride
  int64_t mixed_stride = 0, gate_stride = 0;
  const float *a_log = nullptr, *dt_bias = nullptr;
  int n_key_heads = 0, rows = 0;
  float *q = nullptr, *k = nullptr;     // [rows, key width]
  float *g = nullptr, *beta = nullptr;  // [rows, value heads]
};
void launch_delta_prepare_rows(const DeltaPrepareRows& p, cudaStream_t stream);

struct DeltaRuleRows {
  const float *q = nullptr, *k = nullptr;
  const uint16_t* v = nullptr;  // [rows, value width] at v_stride
  int64_t v_stride = 0;
  const float *g = nullptr, *beta = nullptr;
  float* state = nullptr;  // [slot][value head][column][row] at slot_stride
  int64_t slot_stride = 0;
  int n_key_heads = 0, n_segments = 0;
  StepView step{};
  float* o = nullptr;  // [rows, value width]
};
void launch_delta_rule_rows(const DeltaRuleRows& p, cudaStream_t stream);

struct GatedNormRows {
  const float* o = nullptr;
  const uint16_t* z = nullptr;  // [rows, value width] at z_stride
  int64_t z_stride = 0;
  const float* norm = nullptr;  // [128]
  float epsilon = 1e-6f;
  int n_value_heads = 0, rows = 0;
  uint16_t* y = nullptr;  // [rows, value width]
};
void launch_gated_norm_rows(const GatedNormRows& p, cudaStream_t stream);

struct HeadNormRopeRows {
  const uint16_t* x = nullptr;  // [rows] at stride: head h at h * head_stride
  int64_t stride = 0, head_stride = 0;
  const float* weight = nullptr;
  float epsilon = 1e-6f;
  int n_heads = 0, rows = 0;
  StepView step{};
  uint16_t* y = nullptr;  // [rows, heads * 256]
};
void launch_head_norm_rope_rows(const HeadNormRopeRows& p, cudaStream_t stream);

struct KvAppendRows {
  const uint16_t* k = nullptr;  // [rows, kv width]
  const uint16_t* v = nullptr;  // [rows, kv width] at v_stride
  int64_t v_stride = 0;
  int rows = 0;
  KvCache cache;
  StepView step{};
};
void launch_kv_append_rows(const KvAppendRows& p, cudaStream_t stream);

// Columns from n_tokens on become -infinity.
struct MaskTokens {
  float* logits = nullptr;  // [rows, vocab]
  int vocab = 0, n_tokens = 0, rows = 0;
};
void launch_mask_tokens(const MaskTokens& p, cudaStream_t stream);

}  // namespace lily::cuda
