// Reading weights as the checkpoint stores them: affine 4- and 8-bit codes in groups of 64, or bf16.
// w = scale * code + bias. kBits is 4, 8 or 16 (bf16: scale 1, bias 0).
#ifndef LILY_METAL_QUANTISED_H
#define LILY_METAL_QUANTISED_H

#include <metal_stdlib>
using namespace metal;

#include "params.h"

// A lane's share of a row: 16 consecutive columns, so that 32 lanes read 256 adjacent bytes of 4-bit codes.
constant constexpr uint kSpan = 16;

inline float low_bf16(uint word) { return as_type<float>(word << 16); }
inline float high_bf16(uint word) { return as_type<float>(word & 0xffff0000u); }

inline float silu(float x) { return x / (1.0f + exp(-x)); }
inline float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

inline void unpack_bf16(uint4 words, thread float* out) {
  for (uint i = 0; i < 4; ++i) {
    out[2 * i] = low_bf16(words[i]);
    out[2 * i + 1] = high_bf16(words[i]);
  }
}

// Codes (or values) of 16 columns from column k of a row, as floats.
template <int kBits>
inline void load_codes(device const uchar* w, ulong row, uint in, uint k, thread float* out) {
  device const uchar* at = w + row * (ulong(in) * kBits / 8) + k * kBits / 8;
  if (kBits == 4) {
    const uint2 words = *(device const uint2*)at;
    for (uint i = 0; i < 8; ++i) {
      out[i] = float((words.x >> (4 * i)) & 15u);
      out[8 + i] = float((words.y >> (4 * i)) & 15u);
    }
  } else if (kBits == 8) {
    const uint4 words = *(device const uint4*)at;
    for (uint i = 0; i < 16; ++i) out[i] = float((words[i / 4] >> (8 * (i % 4))) & 255u);
  } else {
    unpack_bf16(*(device const uint4*)at, out);
    unpack_bf16(*(device const uint4*)(at + 16), out + 8);
  }
}

// Scale (x) and bias (y) of the group that column k lies in; `part` has the byte offsets of both.
template <int kBits>
inline float2 load_affine(device const uchar* w, uint2 part, ulong row, uint in, uint k) {
  if (kBits == 16) return float2(1.0f, 0.0f);
  const ulong group = row * (in / kGroup) + k / kGroup;
  const float scale = float(((device const bfloat*)(w + part.x))[group]);
  const float bias = float(((device const bfloat*)(w + part.y))[group]);
  return float2(scale, bias);
}

// acc + the dot product of 16 columns with xs, whose sum is `sum`.
template <int kBits>
inline float accumulate(device const uchar* w, uint2 part, ulong row, uint in, uint k, thread const float* xs,
                        float sum, float acc) {
  float codes[16];
  load_codes<kBits>(w, row, in, k, codes);
  const float2 affine = load_affine<kBits>(w, part, row, in, k);
  float dot = 0.0f;
  for (uint i = 0; i < kSpan; ++i) dot = fma(codes[i], xs[i], dot);
  if (kBits == 16) return acc + dot;
  return fma(affine.x, dot, fma(affine.y, sum, acc));
}

// 16 values of a row of activations, and their sum.
inline float load_span(device const bfloat* x, thread float* xs) {
  unpack_bf16(*(device const uint4*)x, xs);
  unpack_bf16(*(device const uint4*)(x + 8), xs + 8);
  float sum = 0.0f;
  for (uint i = 0; i < kSpan; ++i) sum += xs[i];
  return sum;
}

// The lane's part of kOut dot products: rows first_row ... of a weight with one row of activations.
template <int kBits, int kOut>
inline void dot_rows(device const uchar* w, uint2 part, ulong first_row, uint n_out, uint in,
                     device const bfloat* x, uint lane, thread float* acc) {
  for (uint k = lane * kSpan; k < in; k += 32 * kSpan) {
    float xs[16];
    const float sum = load_span(x + k, xs);
    for (uint r = 0; r < uint(kOut); ++r)
      if (r < n_out) acc[r] = accumulate<kBits>(w, part, first_row + r, in, k, xs, sum, acc[r]);
  }
}

inline void store_output(device uchar* y, device const float* residual, ulong index, float value,
                         uint store) {
  if (store == kStoreBf16) {
    ((device bfloat*)y)[index] = bfloat(value);
  } else if (store == kStoreF32) {
    ((device float*)y)[index] = value;
  } else {
    ((device float*)y)[index] = residual[index] + value;
  }
}

#endif
