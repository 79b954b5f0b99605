// The tile of every matrix product with many rows: kRows (16 or 32) rows of x by 64 output rows of W, 32
// columns of both at a time.
//
// A threadgroup is four simdgroups (128 threads). Weights are dequantised to bf16 in threadgroup memory (P1),
// 16 codes a thread; activations are gathered row by row beside them; the product runs there on 8x8 simdgroup
// matrices with fp32 accumulators (P6), on tensor operations (tensor_tile.h), or on plain fused multiply-adds
// (P6 off). Threadgroup memory: 8.4 KB, first the two operands, in the end the fp32 result.
#ifndef LILY_METAL_GEMM_TILE_H
#define LILY_METAL_GEMM_TILE_H

#include <metal_simdgroup_matrix>

#include "quantised.h"

constant constexpr uint kTileOut = 64;
constant constexpr uint kTileDepth = 32;
constant constexpr uint kTileStride =
    kTileDepth + 8;  // of a row in threadgroup memory, against bank conflicts
constant constexpr uint kResultStride = kTileOut + 2;
constant constexpr uint kTileFloats = 32 * kResultStride;

static_assert(kTileFloats * 4 >= (kMaxTileRows + kTileOut) * kTileStride * 2,
              "operands fit beside each other");

// Products on simdgroup matrices. 32 rows: 2 x 2 simdgroups of 16 x 32; 16 rows: 1 x 4 of 16 x 16.
template <int kRows>
struct SimdgroupProduct {
  simdgroup_matrix<float, 8, 8> acc[2][kRows / 8];

  static uint first_row(uint sg) { return kRows == 32 ? sg / 2 * 16 : 0; }
  static uint first_out(uint sg) { return kRows == 32 ? sg % 2 * 32 : sg * 16; }

  void clear() thread {
    for (uint i = 0; i < 2; ++i)
      for (uint j = 0; j < kRows / 8; ++j) acc[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  void multiply(threadgroup const bfloat* xs, threadgroup const bfloat* ws, uint sg, uint) thread {
    xs += first_row(sg) * kTileStride;
    ws += first_out(sg) * kTileStride;
    for (uint k = 0; k < kTileDepth; k += 8) {
      simdgroup_matrix<bfloat, 8, 8> a[2];
      for (uint i = 0; i < 2; ++i) simdgroup_load(a[i], xs + i * 8 * kTileStride + k, kTileStride);
      for (uint j = 0; j < kRows / 8; ++j) {
        simdgroup_matrix<bfloat, 8, 8> b;
        simdgroup_load(b, ws + j * 8 * kTileStride + k, kTileStride, ulong2(0), true);
        for (uint i = 0; i < 2; ++i) simdgroup_multiply_accumulate(acc[i][j], a[i], b, acc[i][j]);
      }
    }
  }
  void store(threadgroup float* result, uint sg, uint) thread {
    result += first_row(sg) * kResultStride + first_out(sg);
    for (uint i = 0; i < 2; ++i)
      for (uint j = 0; j < kRows / 8; ++j)
        simdgroup_store(acc[i][j], result + i * 8 * kResultStride + j * 8, kResultStride);
  }
};

// P6's ablation: a thread computes every fourth output of one row (16 rows: every eighth).
template <int kRows>
struct VectorProduct {
  static constexpr constant uint kThreads = 128 / kRows;  // of a row
  float acc[kTileOut * kRows / 128];

  void clear() thread {
    for (uint j = 0; j < kTileOut / kThreads; ++j) acc[j] = 0.0f;
  }
  void multiply(threadgroup const bfloat* xs, threadgroup const bfloat* ws, uint, uint lid) thread {
    xs += lid / kThreads * kTileStride;
    for (uint k = 0; k < kTileDepth; ++k) {
      const float x = float(xs[k]);
      for (uint j = 0; j < kTileOut / kThreads; ++j)
        acc[j] = fma(x, float(ws[(j * kThreads + lid % kThreads) * kTileStride + k]), acc[j]);
    }
  }
  void store(threadgroup float* result, uint, uint lid) thread {
    for (uint j = 0; j < kTileOut / kThreads; ++j)
      result[lid / kThreads * kResultStride + j * kThreads + lid % kThreads] = acc[j];
  }
};

// What a tile multiplies. Output row n of the tile is row first_low + n of `low` for n < n_low, and row
// first_high + n - n_low of `high` after that (gate and up side by side); rows at or beyond the limits are
// zero.
struct TileWeights {
  device const uchar* low;
  device const uchar* high;
  uint2 low_part, high_part;
  ulong first_low, first_high;
  uint n_low;
  uint limit_low, limit_high;
  uint in;
};

// 16 columns from k of output row n (two threads a row), dequantised, to threadgroup memory, whose rows are
// kStride values apart.
template <int kBits, uint kStride>
inline void load_weights(TileWeights t, uint k0, threadgroup bfloat* ws, uint lid) {
  const uint n = lid / 2;
  const uint k = k0 + lid % 2 * kSpan;
  const bool is_low = n < t.n_low;
  const uint row = is_low ? n : n - t.n_low;
  threadgroup bfloat* to = ws + n * kStride + lid % 2 * kSpan;
  if (row >= (is_low ? t.limit_low : t.limit_high)) {
    for (uint i = 0; i < kSpan; ++i) to[i] = bfloat(0.0f);
    return;
  }
  device const uchar* w = is_low ? t.low : t.high;
  const ulong at = (is_low ? t.first_low : t.first_high) + row;
  float codes[16];
  load_codes<kBits>(w, at, t.in, k, codes);
  const float2 affine = load_affine<kBits>(w, is_low ? t.low_part : t.high_part, at, t.in, k);
  for (uint i = 0; i < kSpan; ++i) to[i] = bfloat(kBits == 16 ? codes[i] : fma(affine.x, codes[i], affine.y));
}

// Rows of x to threadgroup memory: row r is row source[r], zero from n_rows on.
template <int kRows, uint kStride>
inline void load_activations(device const bfloat* x, ulong stride, uint k0, threadgroup const uint* source,
                             uint n_rows, threadgroup bfloat* xs, uint lid) {
  constexpr uint kColumns = kTileDepth * kRows / 128;  // of a thread: 8 or 4
  constexpr uint kThreads = kTileDepth / kColumns;     // of a row
  const uint r = lid / kThreads;
  const uint c = lid % kThreads * kColumns;
  threadgroup bfloat* to = xs + r * kStride + c;
  if (r < n_rows) {
    device const bfloat* from = x + ulong(source[r]) * stride + k0 + c;
    for (uint i = 0; i < kColumns; ++i) to[i] = from[i];
  } else {
    for (uint i = 0; i < kColumns; ++i) to[i] = bfloat(0.0f);
  }
}

// How a product computes a tile; specialised where the steps below are not its own.
template <int kBits, int kRows, class Product>
struct Tile {
  static void multiply(device const bfloat* x, ulong x_stride, threadgroup const uint* source, uint n_rows,
                       TileWeights weights, threadgroup float* memory, uint sg, uint lid) {
    threadgroup bfloat* xs = (threadgroup bfloat*)memory;
    threadgroup bfloat* ws = xs + kRows * kTileStride;
    Product product;
    product.clear();
    for (uint k = 0; k < weights.in; k += kTileDepth) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      load_activations<kRows, kTileStride>(x, x_stride, k, source, n_rows, xs, lid);
      load_weights<kBits, kTileStride>(weights, k, ws, lid);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      product.multiply(xs, ws, sg, lid);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    product.store(memory, sg, lid);
  }
};

// memory [kTileFloats] holds the result [kRows, 64] with stride kResultStride when this returns (after a
// barrier). All 128 threads call it.
template <int kBits, int kRows, class Product>
inline void multiply_tile(device const bfloat* x, ulong x_stride, threadgroup const uint* source, uint n_rows,
                          TileWeights weights, threadgroup float* memory, uint sg, uint lid) {
  Tile<kBits, kRows, Product>::multiply(x, x_stride, source, n_rows, weights, memory, sg, lid);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

#endif
