// The tile of gemm_tile.h on the tensor operations of Metal 4, which M5's matrix units execute.
//
// Both operands lie in threadgroup memory without gaps; the four simdgroups share one product of kRows x 64 x
// 32 whose fp32 accumulators are a cooperative tensor. Which thread holds which element is the GPU's affair,
// so elements are placed by their coordinates. Bound by matrix products. Weights are rounded to bf16 and sums
// are fp32, as on simdgroup matrices; only the order of sums differs.
#ifndef LILY_METAL_TENSOR_TILE_H
#define LILY_METAL_TENSOR_TILE_H

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include <metal_tensor>

#include "gemm_tile.h"

template <int kRows>
struct TensorProduct {};

template <int kBits, int kRows>
struct Tile<kBits, kRows, TensorProduct<kRows>> {
  static void multiply(device const bfloat* x, ulong x_stride, threadgroup const uint* source, uint n_rows,
                       TileWeights weights, threadgroup float* memory, uint, uint lid) {
    threadgroup bfloat* xs = (threadgroup bfloat*)memory;
    threadgroup bfloat* ws = xs + kRows * kTileDepth;
    constexpr auto description =
        mpp::tensor_ops::matmul2d_descriptor(kRows, int(kTileOut), int(kTileDepth), false, true, false,
                                             mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
    mpp::tensor_ops::matmul2d<description, execution_simdgroups<4>> product;
    tensor<threadgroup bfloat, dextents<int32_t, 2>, tensor_inline> left(
        xs, dextents<int32_t, 2>(int(kTileDepth), kRows));
    tensor<threadgroup bfloat, dextents<int32_t, 2>, tensor_inline> right(
        ws, dextents<int32_t, 2>(int(kTileDepth), int(kTileOut)));
    auto sums = product.template get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
    for (uint16_t i = 0; i < sums.get_capacity(); ++i) sums[i] = 0.0f;
    for (uint k = 0; k < weights.in; k += kTileDepth) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      load_activations<kRows, kTileDepth>(x, x_stride, k, source, n_rows, xs, lid);
      load_weights<kBits, kTileDepth>(weights, k, ws, lid);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      product.run(left, right, sums);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint16_t i = 0; i < sums.get_capacity(); ++i) {
      if (!sums.is_valid_element(i)) continue;
      const auto at = sums.get_multidimensional_index(i);
      memory[uint(at[1]) * kResultStride + uint(at[0])] = sums[i];
    }
  }
};

#endif
