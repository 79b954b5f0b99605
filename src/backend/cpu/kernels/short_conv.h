// (14) causal convolution over 4 tokens, then SiLU, for some channels of consecutive rows of one sequence.
// Accumulates in fp32, oldest tap first. Source and destination state may be the same. Bound by memory and
// by exp.
#pragma once

#include <cstdint>

namespace lily::backend::cpu {

struct ConvArgs {
  const float* x = nullptr;  // [n_rows, x_stride], before convolution
  int64_t x_stride = 0;
  float* y = nullptr;  // [n_rows, y_stride]
  int64_t y_stride = 0;
  int64_t n_rows = 0;
  int64_t channels = 0;             // row length of the states and of w
  const float* w = nullptr;         // [4, channels]: tap 3 is the current token
  const float* state_in = nullptr;  // [3, channels], oldest first; null: zeros
  float* state_out = nullptr;       // [3, channels]
};

// Channels [begin, end), multiples of 16. Column c of x is channel c, and of y.
void short_conv(const ConvArgs& args, int64_t begin, int64_t end);

}  // namespace lily::backend::cpu
