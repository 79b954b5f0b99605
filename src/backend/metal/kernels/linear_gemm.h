// linear_prefill: y = x W^T for many rows, one weight a dispatch.
//
// x [T, in] bf16; y [T, out] bf16, fp32, or fp32 added to the residual. Grid: (out / 64, T / kRows); a
// threadgroup computes one tile of gemm_tile.h. Bound by matrix products from a few hundred rows on, by
// weight bytes below. Weights are rounded to bf16, sums are fp32.
#ifndef LILY_METAL_LINEAR_GEMM_H
#define LILY_METAL_LINEAR_GEMM_H

#include "gemm_tile.h"

template <int kBits, int kRows, class Product>
[[kernel]] void linear_prefill(device const bfloat* x [[buffer(0)]], device uchar* y [[buffer(1)]],
                               device const float* residual [[buffer(2)]],
                               device const uchar* w [[buffer(4)]], constant LinearParams& p [[buffer(20)]],
                               constant StepHeader& step [[buffer(30)]],
                               uint2 group [[threadgroup_position_in_grid]],
                               uint lid [[thread_index_in_threadgroup]],
                               uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup float memory[kTileFloats];
  threadgroup uint source[kMaxTileRows];
  const uint total = p.of_outputs != 0 ? step.n_outputs : step.n_rows;
  const uint first_row = group.y * kRows;
  if (first_row >= total) return;
  const uint n_rows = min(uint(kRows), total - first_row);
  const uint first_out = group.x * kTileOut;
  const uint n_out = min(kTileOut, p.end[0] - first_out);
  if (lid < n_rows) source[lid] = first_row + lid;

  TileWeights weights;
  weights.low = w;
  weights.high = w;
  weights.low_part = uint2(p.scales[0], p.biases[0]);
  weights.high_part = weights.low_part;
  weights.first_low = first_out;
  weights.first_high = 0;
  weights.n_low = kTileOut;
  weights.limit_low = n_out;
  weights.limit_high = 0;
  weights.in = p.in;
  multiply_tile<kBits, kRows, Product>(x + p.x_first, p.x_stride, source, n_rows, weights, memory, sg, lid);
  for (uint i = lid; i < n_rows * kTileOut; i += 128) {
    const uint r = i / kTileOut;
    const uint n = i % kTileOut;
    if (n < n_out)
      store_output(y, residual, ulong(first_row + r) * p.y_stride + p.y_first + first_out + n,
                   memory[r * kResultStride + n], p.store);
  }
}

#endif
