// Numbers in 8 bits, as the int8 KV cache holds them: a group of 64 values is 64 codes and one fp16 scale,
// x ~= scale * code (docs/numerics.md, "An 8-bit KV cache").
//
//   scale = max|x| / 127 in fp32, rounded to fp16, but at least 2^-17 and at most 65504
//   code  = x / scale in fp32, rounded to the nearest integer, ties to even, within -127 .. 127
//
// The error is at most half a scale for |x| <= 127 * 65504; larger values become 127 * 65504. From 2^-17 on a
// scale has at least 8 significant bits (smaller fp16 numbers are subnormal and lose them), so that the
// largest value's code is 127 whichever way the scale was rounded. Therefore what a group reads as is
// quantised to the same group again, bit for bit: values may be copied and saved as floats. A group of zeros
// has the least scale and codes 0. A group with a NaN or an infinity has the scale NaN and codes 0, and reads
// as NaN all over: what is no number stays visible.
#pragma once

#include <cstdint>
#include <span>

#include "base/half.h"

namespace lily::model {

inline constexpr int kInt8Group = 64;       // values that share a scale
inline constexpr int kInt8GroupBytes = 66;  // of 64 codes and a scale
inline constexpr float kLeastInt8Scale = 0x1p-17f;
inline constexpr float kLargestInt8Scale = 65504;

// [64] each.
F16 to_int8_group(std::span<const float, kInt8Group> x, std::span<int8_t, kInt8Group> codes);
void from_int8_group(F16 scale, std::span<const int8_t, kInt8Group> codes, std::span<float, kInt8Group> x);

}  // namespace lily::model
