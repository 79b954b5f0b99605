// K or V of one block and layer, [64][kv_width], in memory of the device's, as the cache's type holds them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "plan/policy.h"

namespace lily::backend::reference {

// int8, or fp32, which is kept for every other type.
class KvRows {
 public:
  static constexpr std::byte kUnwritten{0xff};  // makes a NaN of an fp32 value, and of an fp16 scale
  static size_t n_bytes(plan::KvType type, size_t n_values);
  // A view.
  KvRows(plan::KvType type, std::span<std::byte> bytes)
      : is_int8_(type == plan::KvType::int8), bytes_(bytes) {}

  // Nothing of what lay here can be read any more.
  void clear() { std::fill(bytes_.begin(), bytes_.end(), kUnwritten); }
  // Values [first, first + x.size()); for int8 both are multiples of 64.
  void write(size_t first, std::span<const float> x);  // rounded once
  void read(size_t first, std::span<float> x) const;

 private:
  // int8: model/int8_group.h, codes and scale of each group side by side.
  std::byte* group(size_t first) const;

  bool is_int8_;
  std::span<std::byte> bytes_;
};

}  // namespace lily::backend::reference
