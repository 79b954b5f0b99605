// 16-bit floats as storage types: convert to float, compute in float, round once on store.
#pragma once

#include <bit>
#include <cstdint>

namespace lily {

// bfloat16: the upper half of an IEEE float.
struct Bf16 {
  uint16_t bits = 0;
};

// IEEE half precision.
struct F16 {
  uint16_t bits = 0;
};

inline float to_float(Bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// Round to nearest, ties to even. NaN stays NaN (quiet).
inline Bf16 to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// The value a float has after a round trip through bfloat16.
inline float bf16_rounded(float x) { return to_float(to_bf16(x)); }

float to_float(F16 x);
F16 to_f16(float x);

}  // namespace lily
