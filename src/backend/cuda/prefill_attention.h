// Gated attention of a chunk of one sequence over its KV cache, which the chunk's own keys and values join
// first.
//
//   q_h <- rope(RMSNorm(q_h; q_norm)), k_j likewise; append k_j, v_j          qk_prepare
//   o_h = softmax_{pos' <= pos}(q_h k_{h/8} / 16) v_{h/8}; y = o sigma(gate)  attention
//
// q_gate is q_proj's output: head h has 256 query values at h * 512 and 256 of its gate behind them.
#pragma once

#include "backend/cuda/kernels/host_types.h"
#include "backend/cuda/kernels/kv_layout.h"

namespace lily::cuda {

inline constexpr int kQueryGroup = 8;  // query heads a KV head

struct AttentionArgs {
  int n_tokens;
  int position;  // of the first token = tokens already in the cache
  int n_q_heads;
  const uint16_t* q_gate;  // [n_tokens, q_gate_stride]
  const uint16_t* k;       // [n_tokens, kv_stride]
  const uint16_t* v;
  int64_t q_gate_stride, kv_stride;
  const float* q_norm;  // [256]
  const float* k_norm;
  const float2* rope;          // [n_tokens][32] cos and sin of the token's angles
  KvCache cache;               // n_q_heads = 8 * cache.n_kv_heads
  const int32_t* block_table;  // of this sequence: entry i holds positions 64 i .. 64 i + 63
  uint16_t* q;                 // [n_tokens, n_q_heads * 256]: out of qk_prepare, into attention
  uint16_t* y;                 // [n_tokens, n_q_heads * 256]
};
void qk_prepare_prefill(const AttentionArgs& args, cudaStream_t stream);
void attention_prefill(const AttentionArgs& args, cudaStream_t stream);
// The same by mma.sync, for chips without warpgroup products.
void attention_mma_prefill(const AttentionArgs& args, cudaStream_t stream);

// rope[t][i] = cos and sin of (position + t) * theta^(-i / 32), reduced in double.
void rope_table_prefill(float2* rope, int n_tokens, int position, double theta, cudaStream_t stream);

}  // namespace lily::cuda
