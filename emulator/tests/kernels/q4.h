// Group-64 affine 4-bit weights: 8 codes a word, a bfloat scale and bias for 64 columns.
#pragma once

#include <metal_stdlib>
using namespace metal;

struct LinearParams {
  uint rows;  // of x and y
  uint outputs;
  uint inputs;
};

inline float4 low_codes(uint word) {
  return float4(float(word & 15u), float((word >> 4) & 15u), float((word >> 8) & 15u),
                float((word >> 12) & 15u));
}
inline float4 high_codes(uint word) { return low_codes(word >> 16); }
