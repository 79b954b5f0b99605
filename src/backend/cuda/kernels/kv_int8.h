// The 8-bit cache's codes in registers (model/int8_group.h defines them): rows to codes, codes to bf16.
#pragma once

#include "backend/cuda/kernels/device_ops.h"

namespace lily::cuda {

// A lane's 8 codes of a row of 256 and the scale, as fp16 bits, of the group that they are in.
struct Int8Piece {
  uint2 codes;
  uint32_t scale;
};

// Of a row of bf16, columns 8 l .. 8 l + 7 in lane l: 8 lanes have a group.
__device__ __forceinline__ Int8Piece quantised_row(uint4 bits) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
  uint32_t largest = 0;  // magnitudes of bf16 are in the order of their bits, infinities and NaN above all
#pragma unroll
  for (const uint32_t w : words) {
    const uint32_t low = w & 0x7fffu, high = w >> 16 & 0x7fffu, both = low > high ? low : high;
    largest = both > largest ? both : largest;
  }
#pragma unroll
  for (unsigned m = 1; m < 8; m <<= 1) {
    const uint32_t other = shuffle_xor(largest, m);
    largest = other > largest ? other : largest;
  }
  if (largest >= 0x7f80u) return {make_uint2(0, 0), 0x7e00u};
  const float wanted = bf16_low(largest) / 127.0f;
  const uint32_t scale = f16_bits(fminf(fmaxf(wanted, 7.62939453125e-06f), 65504.0f));  // at least 2^-17
  const float step = f16_value(scale);
  uint32_t codes[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float x = i % 2 ? bf16_high(words[i / 2]) : bf16_low(words[i / 2]);
    const int32_t code = round_to_int(fminf(fmaxf(x / step, -127.0f), 127.0f));
    codes[i / 4] |= (static_cast<uint32_t>(code) & 255u) << (8 * (i % 4));
  }
  return {make_uint2(codes[0], codes[1]), scale};
}

__device__ __forceinline__ void put_int8_row(const Int8Piece& piece, unsigned char* codes,
                                             unsigned char* scales) {
  reinterpret_cast<uint2*>(codes)[lane_id()] = piece.codes;
  if (lane_id() % 8 == 0)
    reinterpret_cast<uint16_t*>(scales)[lane_id() / 8] = static_cast<uint16_t>(piece.scale);
}

// Two codes as bf16, exactly; bytes 0 and 2 of `spread`: 128 + the low seven bits, less 128 or, where the
// sign bit is set, 256.
__device__ __forceinline__ uint32_t code_pair(uint32_t spread) {
  return bf16x2_fma((spread & 0x00800080u) | 0x43004300u, 0xbf80bf80u, (spread & 0x007f007fu) | 0x43004300u);
}
// Codes 2 kHalf and 2 kHalf + 1 of a word.
template <int kHalf>
__device__ __forceinline__ uint32_t codes_of_word(uint32_t word) {
  return code_pair(permute_bytes(word, 0, kHalf == 0 ? 0x4140u : 0x4342u));
}
// Code kIndex of two words.
template <int kIndex>
__device__ __forceinline__ uint32_t codes_of_two(uint32_t a, uint32_t b) {
  return code_pair(permute_bytes(a, b, 0x0000u + kIndex + ((4u + kIndex) << 8)));
}

// 8 codes of one group times their scale, rounded to bf16.
__device__ __forceinline__ uint4 dequantised(uint2 codes, float scale) {
  // A byte in the middle of a mantissa is 128 + (code + 128) / 256, and the rest is one exact fma.
  const float step = scale * 256.0f, offset = scale * -32896.0f;
  const uint32_t words[2] = {codes.x ^ 0x80808080u, codes.y ^ 0x80808080u};
  float x[8];
#pragma unroll
  for (unsigned i = 0; i < 8; ++i)
    x[i] = fmaf(bits_float(permute_bytes(words[i / 4], 0x43000000u, 0x7404u | (i % 4) << 4)), step, offset);
  return make_uint4(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]),
                    bf16_pair(x[6], x[7]));
}

}  // namespace lily::cuda
