// What the matrix kernels of prefill share: which part of a product a block works on. An item is 256 outputs
// (gate and up: 128 of each) x the rows of a tile.
#pragma once

#include "backend/cuda/kernels/prefill_ops.h"
#include "backend/cuda/prefill_linear.h"
#include "pack/mma_q4_layout.h"

namespace lily::cuda {

namespace q4 = pack::mma_q4;

constexpr int kItemOutputs = 256;

enum class Epilogue { bf16, residual, floats, swiglu };

struct ProductParams {
  const uint16_t* x;
  int n_cols;
  int n_tokens;  // dense
  int tile_tokens;
  int n_token_tiles;
  int n_segments;  // 0: expert groups
  int segment_items[kMaxSegments];
  LinearSegment segments[kMaxSegments];
  const float* residual;
  const ExpertTile* tiles;
  const int32_t* n_tiles;
  int n_experts;
  const int32_t* token_of_row;
  const float* row_weight;
  const std::byte* weights;
  const std::byte* weights_up;
  const std::byte* shared;
  const std::byte* shared_up;
};

// What a block works on at a time.
struct Item {
  const std::byte* weights;
  const std::byte* weights_up;
  int first_tile;  // of 16 outputs
  int n_outputs;   // of the whole matrix
  int first_row, n_rows;
  void* out;
  int64_t out_stride;
};

template <Epilogue kEpilogue>
constexpr int item_tiles() {
  return kEpilogue == Epilogue::swiglu ? 8 : 16;
}

// Items of an expert's tile of rows.
template <Epilogue kEpilogue>
__device__ __forceinline__ int blocks_per_expert(const ProductParams& p) {
  return (p.segments[0].n_rows + item_tiles<kEpilogue>() * 16 - 1) / (item_tiles<kEpilogue>() * 16);
}

__device__ __forceinline__ int count_items(const ProductParams& p, int blocks_per_expert) {
  if (p.n_segments == 0) return *p.n_tiles * blocks_per_expert;
  int n = 0;
  for (int s = 0; s < p.n_segments; ++s) n += p.segment_items[s];
  return n;
}

// kRecordBytes: of a record of the weights, packed or expanded.
template <Epilogue kEpilogue, int kRecordBytes = q4::kRecordBytes>
__device__ __forceinline__ Item find_item(const ProductParams& p, int index, int blocks_per_expert) {
  Item item;
  if (p.n_segments == 0) {
    const ExpertTile tile = p.tiles[index / blocks_per_expert];
    const LinearSegment& s = p.segments[0];
    const size_t bytes =
        static_cast<size_t>((s.n_rows + 15) / 16) * static_cast<size_t>(p.n_cols / q4::kGroup) * kRecordBytes;
    const bool is_shared = tile.expert == p.n_experts;
    item.weights = is_shared ? p.shared : p.weights + static_cast<size_t>(tile.expert) * bytes;
    item.weights_up = is_shared ? p.shared_up : p.weights_up + static_cast<size_t>(tile.expert) * bytes;
    item.first_tile = index % blocks_per_expert * item_tiles<kEpilogue>();
    item.n_outputs = s.n_rows;
    item.first_row = tile.first_row;
    item.n_rows = tile.n_rows;
    item.out = s.out;
    item.out_stride = s.out_stride;
    return item;
  }
  int segment = 0;
  while (index >= p.segment_items[segment]) index -= p.segment_items[segment++];
  const LinearSegment& s = p.segments[segment];
  item.weights = item.weights_up = s.weights;
  item.first_tile = index / p.n_token_tiles * item_tiles<kEpilogue>();
  item.n_outputs = s.n_rows;
  item.first_row = index % p.n_token_tiles * p.tile_tokens;
  item.n_rows = min(p.tile_tokens, p.n_tokens - item.first_row);
  item.out = s.out;
  item.out_stride = s.out_stride;
  return item;
}

// The lane's A fragment of 16 columns: registers 0, 2 are row g, 1, 3 row g + 8.
__device__ __forceinline__ void dequantise(uint32_t (&a)[4], uint32_t codes, const uint32_t (&scale)[2],
                                           const uint32_t (&bias)[2]) {
  a[0] = bf16x2_fma(bf16x2_subtract_128(nibbles_plus_128<0>(codes)), scale[0], bias[0]);
  a[1] = bf16x2_fma(bf16x2_subtract_128(nibbles_plus_128<1>(codes)), scale[1], bias[1]);
  a[2] = bf16x2_fma(bf16x2_subtract_128(nibbles_plus_128<2>(codes)), scale[0], bias[0]);
  a[3] = bf16x2_fma(bf16x2_subtract_128(nibbles_plus_128<3>(codes)), scale[1], bias[1]);
}
// Scales and biases of the lane's two rows, each twice in a register, from a record's pair of words.
__device__ __forceinline__ void spread_scales(const uint2& pair, uint32_t (&scale)[2], uint32_t (&bias)[2]) {
  scale[0] = pick_halves(pair.x, pair.x, false), bias[0] = pick_halves(pair.x, pair.x, true);
  scale[1] = pick_halves(pair.y, pair.y, false), bias[1] = pick_halves(pair.y, pair.y, true);
}
__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Where one value of a product goes.
template <Epilogue kEpilogue>
__device__ __forceinline__ void store_one(const ProductParams& p, const Item& item, int row, int output,
                                          float y) {
  const int64_t to = (item.first_row + row) * item.out_stride + output;
  if constexpr (kEpilogue == Epilogue::floats) static_cast<float*>(item.out)[to] = y;
  else if constexpr (kEpilogue == Epilogue::residual)
    static_cast<float*>(item.out)[to] = p.residual[to] + bf16_value(static_cast<uint16_t>(bf16_bits(y)));
  else static_cast<uint16_t*>(item.out)[to] = static_cast<uint16_t>(bf16_bits(y));
}
__device__ __forceinline__ float gated(float gate, float up, float weight) {
  return weight * up * gate / (1.0f + exp_fast(-gate));
}

// ---- the kernels of other units than wgmma; both take ProductParams whose tile_tokens is a multiple of 16
void launch_products_mma(const ProductParams& p, Epilogue epilogue, int n_blocks, cudaStream_t stream);
void launch_products_fma(const ProductParams& p, Epilogue epilogue, int n_blocks, cudaStream_t stream);
// P1's ablation: weights as bf16 in memory, by the wgmma kernel.
void launch_products_expanded(const ProductParams& p, Epilogue epilogue, int n_blocks, cudaStream_t stream);

}  // namespace lily::cuda
