// The inner loop of every 4-bit decode kernel: y[row] = sum over groups of scale * (codes . x) + bias *
// sum(x).
//
// Weights are records of pack/mma_q4.h (16 rows x 64 columns, 576 bytes), copied to shared memory by the copy
// engine. Activations enter as two planes of signed bytes a group of 64: x = unit * (256 p + q), unit =
// max|x| / 32512, exact to 2^-16 of the group's maximum. A record's words, split into low and high nibbles,
// are the u8 A fragments of mma.m16n8k32 as they stand (low: row g, high: row g + 8, 16 times as large), and
// the two planes are two columns of B. Per group
//   y += (scale * unit) * (256 p . codes + q . codes) + bias * sum(x)     in fp32.
// A warp sums a run of groups ("unit" of work): groups 4 i + t of the run in rising i, for each t = 0 .. 3;
// then (t0 + t1) + (t2 + t3). The runs of a tile are summed in rising order through shared memory. The order
// depends on the weight's shape only, never on the number of activation rows.
#pragma once

#include "backend/cuda/kernels/device_ops.h"

namespace lily::cuda {

inline constexpr int kRecordBytes = 576;
inline constexpr int kRecordCodeBytes = 512;
inline constexpr int kTileRows = 16;
inline constexpr int kGroupCols = 64;
inline constexpr int kMaxRows = 8;     // activation rows of one kernel
inline constexpr int kRowsAtOnce = 4;  // activation rows of one product

// Bytes of a staged activation row: two planes, 128 bytes a group. The 32 spread the rows of a fragment over
// the banks.
__host__ __device__ constexpr unsigned staged_row_bytes(int cols) {
  return static_cast<unsigned>(cols) * 2 + 32;
}

// Four groups are read at once, so up to three beyond a row's end, whose products nobody takes: what lies
// there may be anything that is not written at the same time.
inline constexpr unsigned kStagedSlack = 3 * 2 * kGroupCols;

// What the sums of a group need: the unit of its planes, and the sum of its values.
using GroupScale = float2;

// Column c (0 .. 63) of a group is byte (c % 8 / 2) * 16 + (c / 16) * 4 + (c % 2) * 2 + c / 8 % 2 of its
// planes: lane t = l % 4 of a B fragment finds its 16 bytes side by side, in the order in which the nibbles
// of a record's words stand. A 32-bit word holds columns c, c + 8, c + 1, c + 9.

// acc[h][i]: tile row g + 8 i (g = lane / 4), activation row lane % 4 + 4 h.
template <int kRows>
struct UnitSum {
  static constexpr int kHalves = (kRows + kRowsAtOnce - 1) / kRowsAtOnce;
  float acc[kHalves][2];
};

__device__ __forceinline__ void multiply_codes(int32_t (&c)[4], const uint4& codes, const uint4& x) {
  const auto low = [](uint32_t w) { return w & 0x0f0f0f0fu; };
  const auto high = [](uint32_t w) { return w & 0xf0f0f0f0u; };
  c[0] = c[1] = c[2] = c[3] = 0;
  mma_16832(c, low(codes.x), high(codes.x), low(codes.y), high(codes.y), x.x, x.y);
  mma_16832(c, low(codes.z), high(codes.z), low(codes.w), high(codes.w), x.z, x.w);
}
// c: (256 p + q) . codes of rows g and g + 8, by planes.
__device__ __forceinline__ void add_group(float (&acc)[2], const int32_t (&c)[4], uint2 sb, GroupScale s) {
  const auto dot0 = static_cast<float>(c[0] * 256 + c[1]), dot1 = static_cast<float>(c[2] * 16 + (c[3] >> 4));
  acc[0] = fmaf(bf16_low(sb.x) * s.x, dot0, fmaf(bf16_high(sb.x), s.y, acc[0]));
  acc[1] = fmaf(bf16_low(sb.y) * s.x, dot1, fmaf(bf16_high(sb.y), s.y, acc[1]));
}

// records: first record in shared memory. x: staged rows at the first group, n_rows of them. scales:
// [group][kRows].
template <int kRows>
__device__ __forceinline__ UnitSum<kRows> sum_groups(const unsigned char* records, int n_groups,
                                                     const unsigned char* x, unsigned x_row_bytes,
                                                     const GroupScale* scales) {
  const unsigned lane = lane_id(), g = lane / 4, t = lane % 4;
  const auto* codes_at = reinterpret_cast<const uint4*>(records) + lane;
  UnitSum<kRows> total;
  if constexpr (kRows == 1) {
    // Four groups at once: the columns of B are the planes of four groups, so that all lanes have work behind
    // the product: lane t takes from the record of group t what its columns 2 t and 2 t + 1 hold.
    const auto* x_at = reinterpret_cast<const uint4*>(x + g / 2 * (2 * kGroupCols) + g % 2 * kGroupCols) + t;
    const auto* sb_at =
        reinterpret_cast<const uint2*>(records + kRecordCodeBytes) + t * (kRecordBytes / 8) + g;
    float acc[2] = {0, 0};
    const auto add_four = [&](unsigned first, auto record, bool inside) {  // record(j): the j-th of the four
      const uint4 b = x_at[first * (2 * kGroupCols / 16)];  // beyond the run: columns that nobody takes
      int32_t c[4][4];
#pragma unroll
      for (unsigned j = 0; j < 4; ++j) multiply_codes(c[j], codes_at[record(j) * (kRecordBytes / 16)], b);
      const uint2 sb = inside ? sb_at[first * (kRecordBytes / 8)] : make_uint2(0, 0);
      const GroupScale s = inside ? scales[first + t] : make_float2(0, 0);
      int32_t mine[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t even = t & 2 ? c[2][i] : c[0][i], odd = t & 2 ? c[3][i] : c[1][i];
        mine[i] = t & 1 ? odd : even;
      }
      add_group(acc, mine, sb, s);
    };
    const auto n = static_cast<unsigned>(n_groups);
    unsigned first = 0;
    for (; first + 4 <= n; first += 4) add_four(first, [&](unsigned j) { return first + j; }, true);
    if (first < n)
      add_four(first, [&](unsigned j) { return first + j < n ? first + j : n - 1; }, first + t < n);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      acc[i] += shuffle_xor(acc[i], 1);
      total.acc[0][i] = acc[i] + shuffle_xor(acc[i], 2);
    }
  } else {
    const auto* sb_at = reinterpret_cast<const uint2*>(records + kRecordCodeBytes) + g;
    // Column g of B: plane g % 2 of activation row g / 2.
    const auto* x_at = reinterpret_cast<const uint4*>(x + g / 2 * x_row_bytes + g % 2 * kGroupCols) + t;
    float acc[4][UnitSum<kRows>::kHalves][2] = {};
    for (int first = 0; first < n_groups; first += 4) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (first + j >= n_groups) break;
        const auto i = static_cast<unsigned>(first + j);
        const uint4 codes = codes_at[i * (kRecordBytes / 16)];
        const uint2 sb = sb_at[i * (kRecordBytes / 8)];
#pragma unroll
        for (unsigned h = 0; h < UnitSum<kRows>::kHalves; ++h) {
          int32_t c[4];
          multiply_codes(c, codes, x_at[i * (2 * kGroupCols / 16) + h * (kRowsAtOnce * x_row_bytes / 16)]);
          add_group(acc[j][h], c, sb, scales[i * kRows + h * kRowsAtOnce + t]);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < UnitSum<kRows>::kHalves; ++h)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        total.acc[h][i] = (acc[0][h][i] + acc[1][h][i]) + (acc[2][h][i] + acc[3][h][i]);
  }
  return total;
}

// Leaves a unit's sums at partial[activation row][16 tile rows].
template <int kRows>
__device__ __forceinline__ void store_unit(const UnitSum<kRows>& sum, float* partial) {
  const unsigned lane = lane_id(), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int h = 0; h < UnitSum<kRows>::kHalves; ++h) {
    const unsigned row = t + static_cast<unsigned>(h * kRowsAtOnce);
    if (row >= kRows) continue;
    partial[row * kTileRows + g] = sum.acc[h][0];
    partial[row * kTileRows + g + 8] = sum.acc[h][1];
  }
}

// Sum of n units' values that lie `stride` floats apart, in rising order. Loads in batches: they are
// independent.
__device__ __forceinline__ float sum_units(const float* partial, int n, int stride) {
  float sum = 0;
  for (int u = 0; u < n; u += 8) {
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = u + j < n ? partial[(u + j) * stride] : 0.0f;
#pragma unroll
    for (const float x : v) sum += x;
  }
  return sum;
}

// Stages kCount consecutive values from column `first` on (a multiple of kCount) into their group's planes.
// Whole warps take part, 64 / kCount neighbouring lanes a group; `inside` false: the lane's values are zeros
// and nothing is stored.
template <int kCount>
__device__ __forceinline__ void stage_values(const float (&v)[kCount], bool inside, int first,
                                             unsigned char* staged, GroupScale* scales, int scale_stride) {
  constexpr int kLanes = kGroupCols / kCount;
  float largest = 0;
#pragma unroll
  for (const float x : v) largest = fmaxf(largest, fabsf(x));
#pragma unroll
  for (int m = 1; m < kLanes; m <<= 1)
    largest = fmaxf(largest, shuffle_xor(largest, static_cast<unsigned>(m)));
  const float inverse = largest > 0 ? divide_fast(32512.0f, largest) : 0.0f;
  // A lane has half of each word, the lane with the columns 8 away the other half. They exchange, and each
  // stores half of the words: stores of single bytes take several times as long.
  constexpr int kKept = kCount / 4;
  const bool upper = (first >> 3 & 1) != 0;
  int32_t sum = 0;
  uint32_t half_words[2][kCount / 2];
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const int32_t n0 = round_to_int(v[i] * inverse), n1 = round_to_int(v[i + 1] * inverse);
    const int32_t p0 = (n0 + 128) >> 8, p1 = (n1 + 128) >> 8;
    sum += n0 + n1;
    const auto spread = [&](int32_t a, int32_t b) {
      return ((static_cast<uint32_t>(a) & 0xffu) | (static_cast<uint32_t>(b) & 0xffu) << 16)
             << (upper ? 8 : 0);
    };
    half_words[0][i / 2] = spread(p0, p1);
    half_words[1][i / 2] = spread(n0 - 256 * p0, n1 - 256 * p1);
  }
  unsigned char* group = staged + first / kGroupCols * (2 * kGroupCols) + first % kGroupCols / 16 * 4;
#pragma unroll
  for (int plane = 0; plane < 2; ++plane)
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      const uint32_t low = half_words[plane][j], high = half_words[plane][kKept + j];
      const uint32_t word = (upper ? high : low) | shuffle_xor(upper ? low : high, 8 / kCount);
      if (inside)
        *reinterpret_cast<uint32_t*>(group + plane * kGroupCols +
                                     ((first & 7) / 2 + (upper ? kKept : 0) + j) * 16) = word;
    }
#pragma unroll
  for (int m = 1; m < kLanes; m <<= 1) sum += shuffle_xor(sum, static_cast<unsigned>(m));
  const float unit = largest * (1.0f / 32512.0f);
  if (inside && first % kGroupCols == 0)
    scales[first / kGroupCols * scale_stride] = make_float2(unit, unit * static_cast<float>(sum));
}

__device__ __forceinline__ void stage_eight(uint4 bits, bool inside, int first, unsigned char* staged,
                                            GroupScale* scales, int scale_stride) {
  const float v[8] = {bf16_low(bits.x), bf16_high(bits.x), bf16_low(bits.y), bf16_high(bits.y),
                      bf16_low(bits.z), bf16_high(bits.z), bf16_low(bits.w), bf16_high(bits.w)};
  stage_values(v, inside, first, staged, scales, scale_stride);
}

// Stages one bf16 activation row of n_cols (a multiple of 64), by the whole block.
__device__ __forceinline__ void stage_bf16_row(const uint16_t* row, int n_cols, unsigned char* staged,
                                               GroupScale* scales, int scale_stride) {
  for (int i = static_cast<int>(threadIdx.x); (i & ~31) * 8 < n_cols; i += static_cast<int>(blockDim.x)) {
    const bool inside = i * 8 < n_cols;
    const uint4 v = inside ? load_l2(reinterpret_cast<const uint4*>(row) + i) : make_uint4(0, 0, 0, 0);
    stage_eight(v, inside, 8 * i, staged, scales, scale_stride);
  }
}

// The same in two steps, so that the load can be asked for early: thread i of step k has columns
// 4 (i + k * blockDim) .. + 3.
inline constexpr int kBf16Steps = 2;
struct Bf16Part {
  uint2 step[kBf16Steps];
};
__device__ __forceinline__ Bf16Part load_bf16_row(const uint16_t* row, int n_cols) {
  Bf16Part v;
#pragma unroll
  for (int k = 0; k < kBf16Steps; ++k) {
    const int i = static_cast<int>(threadIdx.x + static_cast<unsigned>(k) * blockDim.x);
    v.step[k] = i * 4 < n_cols ? load_l2(reinterpret_cast<const uint2*>(row) + i) : make_uint2(0, 0);
  }
  return v;
}
__device__ __forceinline__ void stage_bf16_part(const Bf16Part& part, int n_cols, unsigned char* staged,
                                                GroupScale* scales, int scale_stride) {
#pragma unroll
  for (int k = 0; k < kBf16Steps; ++k) {
    const int i = static_cast<int>(threadIdx.x + static_cast<unsigned>(k) * blockDim.x);
    if ((i & ~31) * 4 >= n_cols) break;  // whole warps leave together
    const uint2 b = part.step[k];
    const float v[4] = {bf16_low(b.x), bf16_high(b.x), bf16_low(b.y), bf16_high(b.y)};
    stage_values(v, i * 4 < n_cols, 4 * i, staged, scales, scale_stride);
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

// RMSNorm of one row by the whole block: thread i of step k holds columns 4 (i + k * blockDim) .. + 3. At
// most kNormSteps * blockDim * 4 columns.
inline constexpr int kNormSteps = 2;
struct NormPart {
  float4 step[kNormSteps];
};
__device__ __forceinline__ int norm_index(int step) {
  return static_cast<int>(threadIdx.x + static_cast<unsigned>(step) * blockDim.x);
}

// A thread's part of the norm's weight: static, so it is read before the wait.
__device__ __forceinline__ NormPart load_norm_weight(const float* weight, int n_cols) {
  NormPart w;
#pragma unroll
  for (int k = 0; k < kNormSteps; ++k)
    w.step[k] = weight != nullptr && norm_index(k) < n_cols / 4
                    ? reinterpret_cast<const float4*>(weight)[norm_index(k)]
                    : make_float4(0, 0, 0, 0);
  return w;
}
__device__ __forceinline__ float4 load_four(const void* row, bool f32, int i) {
  if (f32) return load_l2(static_cast<const float4*>(row) + i);
  const auto* p = reinterpret_cast<const uint32_t*>(row) + 2 * i;
  const uint32_t a = load_l2(p), b = load_l2(p + 1);
  return make_float4(bf16_low(a), bf16_high(a), bf16_low(b), bf16_high(b));
}
// x * w in fp32 without the norm's factor, which a product may get at its end: the planes of a row do not
// depend on it. Leaves each warp's sum of squares in squares[warp]; norm_factor after the next barrier.
__device__ __forceinline__ NormPart weigh_row(const void* row, bool f32, const NormPart& weight, int n_cols,
                                              float* squares) {
  NormPart v;
  float square = 0;
#pragma unroll
  for (int k = 0; k < kNormSteps; ++k) {
    const int i = norm_index(k);
    const float4 x = i < n_cols / 4 ? load_four(row, f32, i) : make_float4(0, 0, 0, 0), w = weight.step[k];
    square += (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w);
    v.step[k] = make_float4(x.x * w.x, x.y * w.y, x.z * w.z, x.w * w.w);
  }
  square = warp_sum(square);
  if (lane_id() == 0) squares[threadIdx.x / 32] = square;
  return v;
}
// rsqrt(mean(x^2) + eps) from the sums of kWarps (a multiple of 4) warps, in a fixed order.
template <int kWarps>
__device__ __forceinline__ float norm_factor(const float* squares, int n_cols, float epsilon) {
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; w += 4) {
    const float4 v = *reinterpret_cast<const float4*>(squares + w);
    sum += (v.x + v.y) + (v.z + v.w);
  }
  return reciprocal_sqrt(divide_fast(sum, static_cast<float>(n_cols)) + epsilon);
}
// x * rsqrt(mean(x^2) + eps) * w in fp32; zeros beyond the row.
__device__ __forceinline__ NormPart norm_row(const void* row, bool f32, const NormPart& weight, int n_cols,
                                             float epsilon, float* scratch) {
  NormPart v;
  float square = 0;
#pragma unroll
  for (int k = 0; k < kNormSteps; ++k) {
    const int i = norm_index(k);
    v.step[k] = i < n_cols / 4 ? load_four(row, f32, i) : make_float4(0, 0, 0, 0);
    const float4 x = v.step[k];
    square += (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w);
  }
  const float r = reciprocal_sqrt(block_sum(square, scratch) / static_cast<float>(n_cols) + epsilon);
#pragma unroll
  for (int k = 0; k < kNormSteps; ++k) {
    const float4 x = v.step[k], w = weight.step[k];
    v.step[k] = make_float4(x.x * r * w.x, x.y * r * w.y, x.z * r * w.z, x.w * r * w.w);
  }
  return v;
}
__device__ __forceinline__ void stage_norm_part(const NormPart& part, int n_cols, unsigned char* staged,
                                                GroupScale* scales, int scale_stride) {
#pragma unroll
  for (int k = 0; k < kNormSteps; ++k) {
    const int i = norm_index(k);
    if ((i & ~31) >= n_cols / 4) break;  // whole warps leave together
    const float v[4] = {part.step[k].x, part.step[k].y, part.step[k].z, part.step[k].w};
    stage_values(v, i < n_cols / 4, 4 * i, staged, scales, scale_stride);
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
  s.groups_per_unit = (n_groups + wanted * 4 - 1) / (wanted * 4) * 4;  // four groups are summed at once
  s.units_per_tile = (n_groups + s.groups_per_unit - 1) / s.groups_per_unit;
  return s;
}

}  // namespace lily::cuda
