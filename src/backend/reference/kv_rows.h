// K or V of one block and layer, [64][kv_width], as the cache's type holds them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/half.h"
#include "plan/policy.h"

namespace lily::backend::reference {

class KvRows {
 public:
  // int8 or fp32, which is kept for every other type; NaN until something is written.
  KvRows(plan::KvType type, size_t n_values);

  // Values [first, first + x.size()); for int8 both are multiples of 64.
  void write(size_t first, std::span<const float> x);  // rounded once
  void read(size_t first, std::span<float> x) const;

 private:
  std::vector<float> values_;  // fp32
  std::vector<int8_t> codes_;  // int8: model/int8_group.h
  std::vector<F16> scales_;    // [n_values / 64]
};

}  // namespace lily::backend::reference
