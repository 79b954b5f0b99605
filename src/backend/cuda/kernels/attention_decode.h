// Gated attention of decode rows, each of its own sequence: head norms and rotation of q and k, append to the
// cache, softmax(q k) v over all positions, output gate. Equations (7)-(12).
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cuda/kernels/host_types.h"
#include "backend/cuda/kernels/kv_layout.h"
#include "backend/cuda/kernels/step.h"

namespace lily::cuda {

struct AttentionDecode {
  const uint16_t* q_gate =
      nullptr;  // [rows, heads * 512] at stride: per head 256 query values, then 256 of the gate
  const uint16_t *k = nullptr, *v = nullptr;  // [rows, kv heads * 256] at stride; read if `prepare`
  int64_t stride = 0;
  const uint16_t* q = nullptr;  // [rows, heads * 256], normalised and rotated; read unless `prepare`
  bool prepare = true;          // norm, rotate and append here; else QkPrepare has done so
  bool gate = true;             // multiply by the gate's sigmoid
  const float *q_norm = nullptr, *k_norm = nullptr;  // [256]
  float epsilon = 1e-6f;
  int n_q_heads = 0, rows = 1;  // 8 query heads a KV head
  KvCache cache;
  StepView step{};
  float* partial = nullptr;      // [rows][heads][16][260] fp32 scratch
  unsigned* counters = nullptr;  // [rows][heads], zero between launches
  uint16_t* y = nullptr;         // [rows, heads * 256]
};
constexpr size_t attention_partial_floats(int rows, int n_q_heads) {
  return static_cast<size_t>(rows) * static_cast<size_t>(n_q_heads) * 16 * 260;
}
void launch_attention_decode(const AttentionDecode& p, cudaStream_t stream);

}  // namespace lily::cuda
