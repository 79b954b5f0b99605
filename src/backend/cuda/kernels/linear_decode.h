// y = x * W^T for 1 to 8 rows and one or several 4-bit weights whose output rows follow one another in y,
// optionally with RMSNorm in front of it or a residual added behind it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cuda/kernels/host_types.h"

namespace lily::cuda {

inline constexpr int kMaxPieces = 4;

struct LinearPiece {
  const unsigned char* records = nullptr;  // pack/mma_q4.h
  int n_rows = 0;                          // output rows, without padding
  int first_col = 0;                       // of y
};

struct LinearDecode {
  LinearPiece pieces[kMaxPieces];
  int n_pieces = 0;
  int in = 0;                   // columns of x, a multiple of 64
  int rows = 1;                 // 1 .. 8
  const void* x = nullptr;      // [rows, in] at x_stride
  int64_t x_stride = 0;         // elements
  bool x_f32 = false;           // else bf16; fp32 without a norm is rounded to bf16
  const float* norm = nullptr;  // [in]; null: no RMSNorm
  float epsilon = 1e-6f;
  void* y = nullptr;  // [rows, ...] at y_stride; bf16 unless y_f32
  int64_t y_stride = 0;
  bool y_f32 = false;
  const float* residual_in =
      nullptr;  // not null: residual_out = residual_in + product, both [rows, y_stride], y unused
  float* residual_out = nullptr;
  int n_tokens = 0;  // not 0: columns from here on become -infinity (padding rows of the vocabulary)

  // Filled by the launcher.
  int n_tiles = 0, tiles_per_block = 0, units_per_tile = 0, groups_per_unit = 0;
};

// n_sms: blocks that run at once; one block an SM.
void launch_linear_decode(LinearDecode p, int n_sms, cudaStream_t stream);

}  // namespace lily::cuda
