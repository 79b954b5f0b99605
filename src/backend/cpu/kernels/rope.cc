#include "backend/cpu/kernels/rope.h"

#include <cmath>

#include "backend/cpu/kernels/norm.h"

namespace lily::backend::cpu {

std::array<double, kRotaryPairs> rope_frequencies(double theta) {
  std::array<double, kRotaryPairs> frequencies;
  for (int i = 0; i < kRotaryPairs; ++i)
    frequencies[static_cast<size_t>(i)] = std::pow(theta, -static_cast<double>(i) / kRotaryPairs);
  return frequencies;
}

RopeRow rope_row(const std::array<double, kRotaryPairs>& frequencies, int64_t position) {
  RopeRow row;
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double angle = static_cast<double>(position) * frequencies[i];
    row.cos[i] = static_cast<float>(std::cos(angle));
    row.sin[i] = static_cast<float>(std::sin(angle));
  }
  return row;
}

void head_norm_rope(const float* x, const float* w, const RopeRow& rope, float* y) {
  rms_norm(x, w, y, model::kHeadDim);
  for (size_t i = 0; i < rope.cos.size(); ++i) {
    const float a = y[i], b = y[i + kRotaryPairs];
    y[i] = a * rope.cos[i] - b * rope.sin[i];
    y[i + kRotaryPairs] = a * rope.sin[i] + b * rope.cos[i];
  }
}

}  // namespace lily::backend::cpu
