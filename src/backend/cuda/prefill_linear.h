// Products of many rows with 4-bit weights in the mma_q4 layout (pack/mma_q4_layout.h): dense linears and
// expert groups.
//
//   y[r, o] = sum_k x[r, k] * bf16(scale * code + bias)[o, k]        bf16 operands, fp32 accumulation
//
// All pointers are device pointers, activations row-major bf16 bits. Row counts of a chunk are at least 1;
// n_cols is a multiple of 64, numbers of outputs are multiples of 8 (gate and up: of 128). Nothing is
// allocated, no order of summation depends on timing: the same inputs give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cuda/kernels/host_types.h"

namespace lily::cuda {

inline constexpr int kMaxTileTokens = 128;
inline constexpr int kFewTileTokens = 32;
inline constexpr int kLeastTileTokens = 16;

// Most rows of an expert's tile: 32 while experts have about that many, 128 above.
constexpr int expert_tile_rows(int n_tokens, int n_experts) {
  return n_tokens * 8 <= 24 * n_experts ? kFewTileTokens : kMaxTileTokens;
}

// A run of rows of the expert-ordered list that one matrix tile handles.
struct ExpertTile {
  int32_t expert;     // n_experts: the shared expert
  int32_t first_row;  // in expert order
  int32_t n_rows;     // 1 .. tile_rows
};

// One weight matrix of a dense product and where its outputs go.
struct LinearSegment {
  const std::byte* weights;  // mma_q4 [n_rows, n_cols]
  int n_rows;
  void* out;           // [n_tokens, out_stride]: bf16 bits, or float for the other outputs
  int64_t out_stride;  // elements from one token to the next
};

// What multiplies: warpgroup products (Hopper), mma.sync (any chip), or vector arithmetic (P6's ablation).
enum class ProductUnit { wgmma, mma, fma };

enum class LinearOutput {
  bf16,      // out = y
  residual,  // out = bf16(y) + residual, both fp32
  floats,    // out = y in fp32
};

inline constexpr int kMaxSegments = 4;

// Several matrices over the same rows in one launch, e.g. qkv, z, b and a of a delta layer.
struct LinearArgs {
  const uint16_t* x;  // [n_tokens, n_cols]
  int n_tokens;
  int n_cols;
  int n_segments;
  LinearSegment segments[kMaxSegments];
  LinearOutput output;
  const float* residual;  // [n_tokens, out_stride of the segment]; may be the output itself
  ProductUnit unit = ProductUnit::wgmma;
};
void linear_q4_prefill(const LinearArgs& args, int n_multiprocessors, cudaStream_t stream);

// Expert groups. Rows are listed in expert order, `rows_in` of them; the tile list covers them.
//
//   gate_up:  act[r] = bf16(row_weight[r] * silu(x[token(r)] G^T) * (x[token(r)] U^T))      G, U [width,
//   hidden] down:     y[r] = act[r] D^T                                                             D
//   [hidden, width]
//
// The routing weight is applied here, before the down product, so that the combine is a plain sum. An
// expert's matrix is at weights + expert * bytes of one; expert n_experts uses the shared pointers.
struct ExpertArgs {
  const ExpertTile* tiles;
  const int32_t* n_tiles;  // on the device: the count is known only there
  int n_experts;
  const uint16_t* x;            // gate_up: [n_tokens, hidden]; down: act [rows, width]
  const int32_t* token_of_row;  // gate_up only; null: row r reads x[r]
  const float* row_weight;      // gate_up only
  const std::byte* weights;     // gate, or down
  const std::byte* weights_up;
  const std::byte* shared;  // may be null if no tile names expert n_experts
  const std::byte* shared_up;
  int n_rows;                      // outputs of one matrix: width (gate_up) or hidden (down)
  int n_cols;                      // hidden (gate_up) or width (down)
  uint16_t* out;                   // act [rows, width], or y [rows, hidden]
  int tile_rows = kMaxTileTokens;  // most rows of a tile: as given to group_by_expert_prefill
  ProductUnit unit = ProductUnit::wgmma;
  bool expanded = false;  // weights are expand_q4_prefill's (P1's ablation, wgmma only)
};
void experts_gate_up_q4_prefill(const ExpertArgs& args, int n_multiprocessors, cudaStream_t stream);
void experts_down_q4_prefill(const ExpertArgs& args, int n_multiprocessors, cudaStream_t stream);

}  // namespace lily::cuda
