// What the kernels of the delta rule share: the scratch layout. A tile is of one block of 64 tokens and one
// head.
//
//   image: [2 halves of 128 columns][64 tokens][64] bf16, 128-byte swizzle (prefill_ops.h), ready for shared
//   memory frags: 16 x 16 pieces in the register order of a matrix operand, 16 bytes a lane, 512 bytes a
//   piece
#pragma once

#include "backend/cuda/kernels/prefill_ops.h"
#include "backend/cuda/prefill_delta.h"

namespace lily::cuda {

constexpr int kDim = 128;                                 // dk = dv
constexpr uint32_t kImageBytes = kDeltaBlock * kDim * 2;  // 16 KB
constexpr uint32_t kStateFragBytes = kDim * kDim * 2;
constexpr uint32_t kUBytes = kDeltaBlock * kDim * 4;
constexpr uint32_t kXBytes = 2 * kImageBytes;  // both bf16 parts

struct DeltaParams {
  DeltaArgs args;
  int n_blocks;
  unsigned char* q;      // images [key head][block]
  unsigned char* k;      // images [key head][block]
  unsigned char* v;      // images [value head][block]
  unsigned char* u;      // accumulators of U^T: [value head][block][dv / 16][token / 8]
  unsigned char* w;      // frags of W: [value head][block][token / 16][dk / 16]
  unsigned char* x;      // frags of X^T: [value head][block][high, low][dv / 16][token / 16]
  unsigned char* state;  // frags of S^T before the block: [value head][block][dv / 16][dk / 16]
  float* gamma;          // [value head][block][64]: sums of g within the block, token included
  float* decay;          // exp(g)
  float* beta;
};

__device__ __forceinline__ size_t tile_index(const DeltaParams& p, int head, int block) {
  return static_cast<size_t>(head) * static_cast<size_t>(p.n_blocks) + static_cast<size_t>(block);
}

// Byte offset of column `column` (a multiple of 4) of a token in an image.
__device__ __forceinline__ uint32_t image_offset(int token, int column) {
  return swizzled(static_cast<uint32_t>(column / 64) * (kImageBytes / 2), token, column % 64 / 8) +
         static_cast<uint32_t>(column % 8) * 2u;
}
// Address of the 16-byte piece `piece` (of 16) of a token.
__device__ __forceinline__ uint32_t image_piece(uint32_t image, int token, int piece) {
  return swizzled(image + static_cast<uint32_t>(piece / 8) * (kImageBytes / 2), token, piece % 8);
}

DeltaParams delta_params(const DeltaArgs& args);
void delta_prepare(const DeltaParams& p, cudaStream_t stream);

}  // namespace lily::cuda
