// Gated DeltaNet between its projections, for a chunk of one sequence: convolution + SiLU, L2 norms, gates,
// the delta rule, gated norm.
//
//   c_t = silu(sum_j w[:, j] m_{t-3+j}); q, k, v = heads of c
//   q <- q / sqrt(sum q^2 + 1e-6) / sqrt(128); k <- k / sqrt(sum k^2 + 1e-6)
//   g = -exp(A_log) softplus(a + dt_bias); beta = sigmoid(b)
//   S <- exp(g) S; delta = beta (v - S^T k); S <- S + k delta^T; o = S^T q    (value head h, key head h / 2)
//   y = RMSNorm(o; norm) silu(z)
//
// Two forms of the rule. `blocks`: WY form in blocks of 64 tokens, matrix products with fp32 accumulation,
// what a token adds in two bf16 parts, the triangular solve and all decays in fp32, the state in fp32 with a
// bf16 copy as operand. `scan`: token by token, the state's columns in registers, fp32 throughout; better
// below some 32 rows, and the reference for the other.
#pragma once

#include "backend/cuda/prefill_linear.h"

namespace lily::cuda {

inline constexpr int kDeltaBlock = 64;  // tokens

struct DeltaArgs {
  int n_tokens, n_key_heads, n_value_heads;  // two value heads a key head
  const uint16_t* qkv;  // [n_tokens, qkv_stride] before the convolution: q heads, k heads, v heads of 128
  const uint16_t* z;    // [n_tokens, z_stride]: value heads of 128
  const uint16_t* b;    // [n_tokens, ab_stride]
  const uint16_t* a;
  int64_t qkv_stride, z_stride, ab_stride;
  const uint16_t* conv_weight;  // [conv channels, 4]; tap 3 is the current token
  const float* a_log;           // [n_value_heads]
  const float* dt_bias;         // [n_value_heads]
  const float* norm;            // [128]
  const uint16_t* conv_in;      // [3, conv channels], oldest first; null: zeros
  uint16_t* conv_out;           // may be conv_in
  const float* state_in;        // [n_value_heads, dv, dk]: a state column is contiguous; null: zeros
  float* state_out;             // may be state_in
  uint16_t* y;                  // [n_tokens, n_value_heads * 128]
  std::byte* scratch;           // delta_scratch_bytes, 256-byte aligned
};

constexpr int delta_blocks(int n_tokens) { return (n_tokens + kDeltaBlock - 1) / kDeltaBlock; }
// q and k tiles of each key head; v, U (fp32), W and X (two parts) tiles, a bf16 state and gates of each
// value head; for every block.
constexpr size_t delta_scratch_bytes(int n_tokens, int n_key_heads, int n_value_heads) {
  const size_t tile = size_t{kDeltaBlock} * 128 * 2;
  const size_t of_value_head = 6 * tile + 2 * tile + 3 * kDeltaBlock * sizeof(float);
  return static_cast<size_t>(delta_blocks(n_tokens)) *
         (2 * tile * static_cast<size_t>(n_key_heads) + of_value_head * static_cast<size_t>(n_value_heads));
}

void delta_blocks_prefill(const DeltaArgs& args, cudaStream_t stream);  // 4 kernels
void delta_scan_prefill(const DeltaArgs& args, cudaStream_t stream);    // 2 kernels

}  // namespace lily::cuda
