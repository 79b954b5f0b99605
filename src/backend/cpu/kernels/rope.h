// (7) (8) RMSNorm of a head, then rotation of its first 64 values, pairs (i, i + 32), by position * theta^(-i
// / 32). Angles reach 2.6e5 rad, so they are formed and reduced in double precision; the table of a step's
// positions is made once and serves all layers.
#pragma once

#include <array>
#include <cstdint>

#include "model/dims.h"

namespace lily::backend::cpu {

inline constexpr int kRotaryPairs = model::kRotaryDim / 2;

struct RopeRow {
  std::array<float, kRotaryPairs> cos, sin;
};

std::array<double, kRotaryPairs> rope_frequencies(double theta);
RopeRow rope_row(const std::array<double, kRotaryPairs>& frequencies, int64_t position);

// x, y: [256]; may be the same.
void head_norm_rope(const float* x, const float* w, const RopeRow& rope, float* y);

}  // namespace lily::backend::cpu
