// The grouped expert GEMM: matrix products over the rows that each expert got.
//
// Grid: the blocks of the map that group_assignments wrote, by indirect dispatch; a threadgroup takes one
// block (expert, up to 32 rows of it) and walks over the output columns, so that its rows are gathered from
// nearby memory while the weights stream by. Tiles are those of gemm_tile.h: 32 rows where the block has more
// than 16, else 16 (P3). Weights are dequantised tile by tile (P1) and never exist in memory; with kBits = 16
// they are read expanded (its ablation). Bound by weight bytes below about 16 rows an expert, by matrix
// products above.
//
// experts_gate_up_prefill (24): mid [A, width] bf16; a tile has 32 gate rows and the 32 up rows of the same
//   columns, the activation runs on the finished tile. experts_linear_prefill: one projection, y [A, out]
//   bf16.
#ifndef LILY_METAL_EXPERTS_GEMM_H
#define LILY_METAL_EXPERTS_GEMM_H

#include "gemm_tile.h"

template <int kBits, template <int> class Product>
inline void multiply_block(device const bfloat* x, ulong x_stride, threadgroup const uint* source,
                           uint n_rows, TileWeights weights, threadgroup float* memory, uint sg, uint lid) {
  if (n_rows > 16)
    multiply_tile<kBits, 32, Product<32>>(x, x_stride, source, n_rows, weights, memory, sg, lid);
  else multiply_tile<kBits, 16, Product<16>>(x, x_stride, source, n_rows, weights, memory, sg, lid);
}

template <int kBits, template <int> class Product>
[[kernel]] void experts_gate_up_prefill(
    device const bfloat* x [[buffer(0)]], device const int* order [[buffer(1)]],
    device bfloat* mid [[buffer(2)]], device const int4* blocks [[buffer(3)]],
    device const uchar* gate [[buffer(4)]], device const uchar* up [[buffer(5)]],
    constant ExpertsParams& p [[buffer(20)]], uint group [[threadgroup_position_in_grid]],
    uint lid [[thread_index_in_threadgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup float memory[kTileFloats];
  threadgroup uint source[kMaxTileRows];
  const int4 block = blocks[group];
  const uint expert = uint(block.x);
  const uint first_row = uint(block.y);
  const uint n_rows = uint(block.z);
  if (lid < n_rows) source[lid] = uint(order[first_row + lid]) / kTopK;

  TileWeights weights;
  weights.low = gate;
  weights.high = up;
  weights.low_part = uint2(p.scales[0], p.biases[0]);
  weights.high_part = uint2(p.scales[1], p.biases[1]);
  weights.n_low = kTileOut / 2;
  weights.in = p.in;
  for (uint first = 0; first < p.out; first += kTileOut / 2) {
    weights.first_low = ulong(expert) * p.out + first;
    weights.first_high = weights.first_low;
    weights.limit_low = p.out - first;
    weights.limit_high = p.out - first;
    multiply_block<kBits, Product>(x, p.x_stride, source, n_rows, weights, memory, sg, lid);
    for (uint i = lid; i < n_rows * (kTileOut / 2); i += 128) {
      const uint r = i / (kTileOut / 2);
      const uint n = i % (kTileOut / 2);
      const float g = memory[r * kResultStride + n];
      const float u = memory[r * kResultStride + kTileOut / 2 + n];
      if (first + n < p.out) mid[ulong(first_row + r) * p.y_stride + first + n] = bfloat(silu(g) * u);
    }
  }
}

template <int kBits, template <int> class Product>
[[kernel]] void experts_linear_prefill(device const bfloat* x [[buffer(0)]],
                                       device const int* order [[buffer(1)]], device bfloat* y [[buffer(2)]],
                                       device const int4* blocks [[buffer(3)]],
                                       device const uchar* w [[buffer(4)]],
                                       constant ExpertsParams& p [[buffer(20)]],
                                       uint group [[threadgroup_position_in_grid]],
                                       uint lid [[thread_index_in_threadgroup]],
                                       uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup float memory[kTileFloats];
  threadgroup uint source[kMaxTileRows];
  const int4 block = blocks[group];
  const uint expert = uint(block.x);
  const uint first_row = uint(block.y);
  const uint n_rows = uint(block.z);
  if (lid < n_rows) source[lid] = p.from_tokens != 0 ? uint(order[first_row + lid]) / kTopK : first_row + lid;

  TileWeights weights;
  weights.low = w;
  weights.high = w;
  weights.low_part = uint2(p.scales[0], p.biases[0]);
  weights.high_part = weights.low_part;
  weights.first_high = 0;
  weights.n_low = kTileOut;
  weights.limit_high = 0;
  weights.in = p.in;
  for (uint first = 0; first < p.out; first += kTileOut) {
    weights.first_low = ulong(expert) * p.out + first;
    weights.limit_low = p.out - first;
    multiply_block<kBits, Product>(x, p.x_stride, source, n_rows, weights, memory, sg, lid);
    for (uint i = lid; i < n_rows * kTileOut; i += 128) {
      const uint r = i / kTileOut;
      const uint n = i % kTileOut;
      if (first + n < p.out)
        y[ulong(first_row + r) * p.y_stride + first + n] = bfloat(memory[r * kResultStride + n]);
    }
  }
}

#endif
