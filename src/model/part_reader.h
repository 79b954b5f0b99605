// Reads floating-point tensors as the type the program computes with, and refuses what no arithmetic
// survives.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/half.h"
#include "model/checkpoint.h"

namespace lily::model {

// One a thread: it owns the room that conversions need (1 MB at most).
class PartReader {
 public:
  explicit PartReader(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  // Bytes as they are.
  void read_bytes(const Part& part, int64_t offset, std::span<std::byte> out);
  // Elements [first, first + out.size()) of a BF16, F16 or F32 part, rounded once where the type is wider.
  // NaN and infinity, also those that rounding makes, are errors that name the tensor and the element.
  void read_bf16(const Part& part, int64_t first, std::span<Bf16> out);
  void read_f32(const Part& part, int64_t first, std::span<float> out);

 private:
  template <typename Out>
  void convert(const Part& part, int64_t first, std::span<Out> out);

  const Checkpoint& checkpoint_;
  std::vector<std::byte> scratch_;
};

}  // namespace lily::model
