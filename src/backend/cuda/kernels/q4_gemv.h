// The inner loop of every 4-bit decode kernel: y[row] = sum over groups of scale * (codes . x) + bias * sum(x).
//
// Weights are records of pack/mma_q4.h (16 rows x 64 columns, 576 bytes), copied to shared memory by the copy engine;
// a warp multiplies one record with four mma.m16n8k16, columns of B being 1 or up to 8 activation rows. Codes enter
// the product as 128 + code, so each group's fp32 accumulator holds codes . x + 128 * sum(x), and
//   y += scale * (accumulator - 128 * sum(x)) + bias * sum(x)     in fp32, groups in rising order.
// A warp sums a run of groups ("unit"), the units of a tile are summed in rising order through shared memory. The order
// depends on the weight's shape only, never on the number of activation rows.
#pragma once

#include "backend/cuda/kernels/device_ops.h"

namespace lily::cuda {

inline constexpr int kRecordBytes = 576;
inline constexpr int kRecordCodeBytes = 512;
inline constexpr int kTileRows = 16;
inline constexpr int kGroupCols = 64;
inline constexpr int kMaxRows = 8;  // activation rows of one kernel

// Bytes between activation rows in shared memory; the 64 spread the 8 rows of a B fragment over all banks.
__host__ __device__ constexpr unsigned staged_row_bytes(int cols) { return static_cast<unsigned>(cols) * 2 + 64; }

// Where the pair of columns (2 w, 2 w + 1) stands in a staged row, in words: lane t = l % 4 of a B fragment finds its
// four words for 32 columns side by side.
__device__ __forceinline__ int staged_word(int w) {
  return (w & ~15) | (w & 3) << 2 | (w & 8) >> 2 | (w & 4) >> 2;
}

// Sums of one record run. kRows 1: acc[0] row g, acc[1] row g + 8 of the tile (g = lane / 4), equal in the lanes of a
// quad. kRows 8: acc[2 i + j] is tile row g + 8 i, activation row 2 t + j.
template <int kRows>
struct UnitSum {
  float acc[kRows == 1 ? 2 : 4];
};

// records: first record in shared memory. x: staged rows at the first group. sums: [group][kRows] from the first group.
template <int kRows>
__device__ __forceinline__ UnitSum<kRows> sum_groups(const unsigned char* records, int n_groups, const unsigned char* x,
                                                     unsigned x_row_bytes, const float* sums) {
  const unsigned lane = lane_id(), g = lane / 4, t = lane % 4;
  UnitSum<kRows> total;
#pragma unroll
  for (float& a : total.acc) a = 0;
  if (kRows > 1) x += g * x_row_bytes;
#pragma unroll 2
  for (int i = 0; i < n_groups; ++i) {
    const uint4 codes = reinterpret_cast<const uint4*>(records)[lane];
    const uint2 sb = reinterpret_cast<const uint2*>(records + kRecordCodeBytes)[g];
    const uint4 b0 = reinterpret_cast<const uint4*>(x)[t];
    const uint4 b1 = reinterpret_cast<const uint4*>(x)[4 + t];
    float c[4] = {0, 0, 0, 0};
    const auto step = [&c](uint32_t w, uint32_t low, uint32_t high) {
      mma_16816(c, nibbles_plus_128<0>(w), nibbles_plus_128<1>(w), nibbles_plus_128<2>(w), nibbles_plus_128<3>(w), low,
                high);
    };
    step(codes.x, b0.x, b0.y);
    step(codes.y, b0.z, b0.w);
    step(codes.z, b1.x, b1.y);
    step(codes.w, b1.z, b1.w);
    const float scale0 = bf16_low(sb.x), bias0 = bf16_high(sb.x), scale1 = bf16_low(sb.y), bias1 = bf16_high(sb.y);
    if constexpr (kRows == 1) {
      const float s = sums[i];
      total.acc[0] = fmaf(scale0, fmaf(-128.0f, s, c[0]), fmaf(bias0, s, total.acc[0]));
      total.acc[1] = fmaf(scale1, fmaf(-128.0f, s, c[2]), fmaf(bias1, s, total.acc[1]));
    } else {
      const float2 s = reinterpret_cast<const float2*>(sums + i * kRows)[t];
      total.acc[0] = fmaf(scale0, fmaf(-128.0f, s.x, c[0]), fmaf(bias0, s.x, total.acc[0]));
      total.acc[1] = fmaf(scale0, fmaf(-128.0f, s.y, c[1]), fmaf(bias0, s.y, total.acc[1]));
      total.acc[2] = fmaf(scale1, fmaf(-128.0f, s.x, c[2]), fmaf(bias1, s.x, total.acc[2]));
      total.acc[3] = fmaf(scale1, fmaf(-128.0f, s.y, c[3]), fmaf(bias1, s.y, total.acc[3]));
    }
    records += kRecordBytes;
    x += 2 * kGroupCols;
  }
  return total;
}

// Leaves a unit's sums at partial[activation row][16 tile rows].
template <int kRows>
__device__ __forceinline__ void store_unit(const UnitSum<kRows>& sum, float* partial) {
  const unsigned lane = lane_id(), g = lane / 4, t = lane % 4;
  if constexpr (kRows == 1) {
    if (t == 0) {
      partial[g] = sum.acc[0];
      partial[g + 8] = sum.acc[1];
    }
  } else {
    partial[2 * t * kTileRows + g] = sum.acc[0];
    partial[(2 * t + 1) * kTileRows + g] = sum.acc[1];
    partial[2 * t * kTileRows + g + 8] = sum.acc[2];
    partial[(2 * t + 1) * kTileRows + g + 8] = sum.acc[3];
  }
}

// Stages eight values (v, columns 8 i .. 8 i + 7 of a row) by whole warps; the sum of a group of 64 is left at
// sums[group * sum_stride] by the first of its eight lanes. `inside` false: the lane only takes part.
__device__ __forceinline__ void stage_eight(uint4 v, bool inside, int i, uint32_t* words, float* sums, int sum_stride) {
  float s = ((bf16_low(v.x) + bf16_high(v.x)) + (bf16_low(v.y) + bf16_high(v.y))) +
            ((bf16_low(v.z) + bf16_high(v.z)) + (bf16_low(v.w) + bf16_high(v.w)));
  s += shuffle_xor(s, 1);
  s += shuffle_xor(s, 2);
  s += shuffle_xor(s, 4);
  if (!inside) return;
  words[staged_word(4 * i)] = v.x;
  words[staged_word(4 * i + 1)] = v.y;
  words[staged_word(4 * i + 2)] = v.z;
  words[staged_word(4 * i + 3)] = v.w;
  if ((i & 7) == 0) sums[i / 8 * sum_stride] = s;
}

// Stages one bf16 activation row of n_cols (a multiple of 64), by the whole block.
__device__ __forceinline__ void stage_bf16_row(const uint16_t* row, int n_cols, unsigned char* staged, float* sums,
                                               int sum_stride) {
  auto* words = reinterpret_cast<uint32_t*>(staged);
  for (int i = static_cast<int>(threadIdx.x); (i & ~31) * 8 < n_cols; i += static_cast<int>(blockDim.x)) {
    const bool inside = i * 8 < n_cols;
    const uint4 v = inside ? load_l2(reinterpret_cast<const uint4*>(row) + i) : make_uint4(0, 0, 0, 0);
    stage_eight(v, inside, i, words, sums, sum_stride);
  }
}

// Sum over the block in a fixed order; scratch holds one float a warp. Contains two barriers.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  if (lane_id() == 0) scratch[threadIdx.x / 32] = x;
  block_sync();
  const unsigned n_warps = blockDim.x / 32;
  x = lane_id() < n_warps ? scratch[lane_id()] : 0.0f;
  x = warp_sum(x);
  block_sync();
  return x;
}

// y = x * rsqrt(mean(x^2) + eps) * w, rounded to bf16, staged like stage_bf16_row; x is fp32 or bf16. Also stored to
// `normed` unless it is null. At most kNormSteps * blockDim * 4 columns.
inline constexpr int kNormSteps = 4;
__device__ __forceinline__ float4 load_four(const void* row, bool f32, int i) {
  if (f32) return load_l2(static_cast<const float4*>(row) + i);
  const auto* p = reinterpret_cast<const uint32_t*>(row) + 2 * i;
  const uint32_t a = load_l2(p), b = load_l2(p + 1);
  return make_float4(bf16_low(a), bf16_high(a), bf16_low(b), bf16_high(b));
}
__device__ __forceinline__ void stage_normed_row(const void* row, bool f32, const float* weight, int n_cols,
                                                 float epsilon, unsigned char* staged, float* sums, int sum_stride,
                                                 uint16_t* normed, float* scratch) {
  auto* words = reinterpret_cast<uint32_t*>(staged);
  const int n4 = n_cols / 4, threads = static_cast<int>(blockDim.x);
  float4 v[kNormSteps];
  float square = 0;
#pragma unroll
  for (int k = 0; k < kNormSteps; ++k) {
    const int i = static_cast<int>(threadIdx.x) + k * threads;
    v[k] = i < n4 ? load_four(row, f32, i) : make_float4(0, 0, 0, 0);
    square += (v[k].x * v[k].x + v[k].y * v[k].y) + (v[k].z * v[k].z + v[k].w * v[k].w);
  }
  const float r = reciprocal_sqrt(block_sum(square, scratch) / static_cast<float>(n_cols) + epsilon);
#pragma unroll
  for (int k = 0; k < kNormSteps; ++k) {
    const int i = static_cast<int>(threadIdx.x) + k * threads;
    if ((i & ~31) >= n4) break;  // whole warps leave together
    const float4 w = i < n4 ? reinterpret_cast<const float4*>(weight)[i] : make_float4(0, 0, 0, 0);
    const uint32_t low = bf16_pair(v[k].x * r * w.x, v[k].y * r * w.y);
    const uint32_t high = bf16_pair(v[k].z * r * w.z, v[k].w * r * w.w);
    float s = (bf16_low(low) + bf16_high(low)) + (bf16_low(high) + bf16_high(high));
#pragma unroll
    for (int m = 1; m < 16; m <<= 1) s += shuffle_xor(s, m);
    if (i >= n4) continue;
    words[staged_word(2 * i)] = low;
    words[staged_word(2 * i + 1)] = high;
    if ((i & 15) == 0 && sums != nullptr) sums[i / 16 * sum_stride] = s;
    if (normed != nullptr) reinterpret_cast<uint2*>(normed)[i] = make_uint2(low, high);
  }
}

// How a block's tiles are cut into units for its warps.
struct UnitSplit {
  int units_per_tile = 1;
  int groups_per_unit = 1;  // the last unit of a tile may have fewer
};
inline UnitSplit split_units(int n_tiles, int n_groups, int n_warps) {
  int shared_factor = n_warps;  // the power-of-two part that tiles and warps have in common
  while (n_tiles % shared_factor != 0) shared_factor /= 2;
  const int wanted = n_warps / shared_factor;
  UnitSplit s;
  s.groups_per_unit = (n_groups + wanted - 1) / wanted;
  s.units_per_tile = (n_groups + s.groups_per_unit - 1) / s.groups_per_unit;
  return s;
}

}  // namespace lily::cuda
