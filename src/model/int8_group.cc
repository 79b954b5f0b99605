#include "model/int8_group.h"

#include <algorithm>
#include <cmath>

namespace lily::model {
namespace {

constexpr F16 kNan{0x7e00};
constexpr float kMaxCode = 127;

}  // namespace

F16 to_int8_group(std::span<const float, kInt8Group> x, std::span<int8_t, kInt8Group> codes) {
  float largest = 0;
  bool finite = true;
  for (const float v : x) {
    finite = finite && std::isfinite(v);
    largest = std::max(largest, std::abs(v));
  }
  if (!finite) {
    std::fill(codes.begin(), codes.end(), int8_t{0});
    return kNan;
  }
  const F16 scale = to_f16(std::clamp(largest / kMaxCode, kLeastInt8Scale, kLargestInt8Scale));
  const float step = to_float(scale);
  for (size_t i = 0; i < kInt8Group; ++i)
    codes[i] = static_cast<int8_t>(std::nearbyint(std::clamp(x[i] / step, -kMaxCode, kMaxCode)));
  return scale;
}

void from_int8_group(F16 scale, std::span<const int8_t, kInt8Group> codes, std::span<float, kInt8Group> x) {
  const float step = to_float(scale);
  for (size_t i = 0; i < kInt8Group; ++i) x[i] = step * static_cast<float>(codes[i]);
}

}  // namespace lily::model
