// Routing of a chunk without the host: expert choice, rows in expert order, tile list, and the sum that ends
// the layer.
//
//   logits[t, e] = sum_k u[t, k] (scale * code + bias)[e, k]       8-bit codes exact, fp32
//   T(t) = the 8 largest logits, lower index on ties; s_e = exp(l_e) / sum_{T} exp(l)
//   shared gate: sigma(u w_sg^T)
//
// Expert order: row r of the list belongs to one (token, expert); an expert's rows are in token order,
// experts in ascending order; the n_tokens rows of the shared expert follow, row 8 n_tokens + t being token
// t. Rows thus count 9 n_tokens (8 n_tokens without a shared expert).
#pragma once

#include "backend/cuda/prefill_linear.h"

namespace lily::cuda {

inline constexpr int kRouted = 8;  // experts a token
inline constexpr int kMaxExperts = 512;

// 8-bit affine weights as in the file: codes [n_rows, n_cols] bytes, scales and biases bf16 bits [n_rows,
// n_cols / 64].
struct Q8Matrix {
  const uint8_t* codes;
  const uint16_t* scales;
  const uint16_t* biases;
};

struct RouterArgs {
  const uint16_t* u;                // [n_tokens, hidden] normalised
  int n_tokens, hidden, n_experts;  // n_experts a multiple of 16, at least 16, at most kMaxExperts
  Q8Matrix router;                  // [n_experts, hidden]
  Q8Matrix shared_gate;             // [1, hidden]
  int32_t* chosen;                  // out [n_tokens, 8]: experts by descending logit
  float* chosen_weight;             // out [n_tokens, 8]
  float* shared_weight;             // out [n_tokens]
  float* logits;                    // out [n_tokens, n_experts], or null
};
void router_q8_prefill(const RouterArgs& args, cudaStream_t stream);

// Largest number of tiles that up to n_tokens can need, for sizing `tiles`; tiles of few rows have
// `few_rows`.
constexpr int max_expert_tiles(int n_tokens, int n_experts, int few_rows = kFewTileTokens) {
  const int with_few = n_tokens < 3 * n_experts || few_rows < kFewTileTokens ? n_tokens : 3 * n_experts;
  const int few = (kRouted + 1) * with_few / few_rows, many = (kRouted + 1) * n_tokens / kMaxTileTokens;
  return n_experts + 1 + (few > many ? few : many) + 1;
}

struct GroupArgs {
  const int32_t* chosen;
  const float* chosen_weight;
  const float* shared_weight;
  int n_tokens, n_experts;
  bool with_shared;                // list the shared expert's rows and tiles as expert n_experts
  int32_t* expert_rows;            // out [n_experts]: rows of each expert
  int32_t* token_of_row;           // out [9 n_tokens]
  float* row_weight;               // out [9 n_tokens]
  int32_t* row_of_choice;          // out [n_tokens, 8]: the inverse
  ExpertTile* tiles;               // out [max_expert_tiles]: experts with most rows first
  int32_t* n_tiles;                // out [1]
  int tile_rows = kMaxTileTokens;  // most rows of a tile: expert_tile_rows
};
// Two kernels: a histogram, then one block an expert that lists its rows, and one more that lists the tiles.
void group_by_expert_prefill(const GroupArgs& args, cudaStream_t stream);

// out[t] = residual[t] + sum_{j < 8} y[row_of_choice[t, j]] + y[8 n_tokens + t], summed in that order in
// fp32; if norm_weight: normed[t] = RMSNorm(out[t]) * norm_weight as well, rounded once. The residual stream
// is fp32.
struct CombineArgs {
  const uint16_t* y;         // [9 n_tokens, hidden]
  const uint16_t* y_shared;  // [n_tokens, hidden]: y + 8 n_tokens * hidden, or elsewhere
  const int32_t* row_of_choice;
  const float* residual;  // [n_tokens, hidden]; may be out
  int n_tokens, hidden;   // hidden a multiple of 8, at most 8,192
  float* out;
  const float* norm_weight;  // [hidden] or null
  uint16_t* normed;
};
void combine_experts_prefill(const CombineArgs& args, cudaStream_t stream);

// normed[t] = x[t] * (mean(x[t]^2) + 1e-6)^(-1/2) * weight, fp32 inside, one rounding. hidden as above.
void rms_norm_prefill(const float* x, const float* weight, uint16_t* normed, int n_tokens, int hidden,
                      cudaStream_t stream);

// x[t] = scale * code + bias of row ids[t] of a 4-bit embedding in the file's layout; then, if norm_weight,
// normed as above.
struct EmbeddingArgs {
  const int32_t* ids;      // [n_tokens]
  const uint32_t* codes;   // [vocab, hidden / 8]
  const uint16_t* scales;  // [vocab, hidden / 64]
  const uint16_t* biases;
  int n_tokens, hidden;
  float* x;  // [n_tokens, hidden]
  const float* norm_weight;
  uint16_t* normed;
};
void embedding_q4_prefill(const EmbeddingArgs& args, cudaStream_t stream);

}  // namespace lily::cuda
