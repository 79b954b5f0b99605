// Where the parts of a weight lie in its range of GPU memory: as in the checkpoint, one after the other.
#pragma once

#include <cstdint>
#include <functional>

#include "model/weight.h"

namespace lily::metal {

struct WeightLayout {
  model::Storage storage = model::Storage::q4;
  int64_t in = 0, rows = 0;  // rows: of all matrices
  int64_t codes_bytes = 0;   // codes, bf16 values or fp32 values, from 0
  int64_t scales = 0, biases = 0;
  int64_t bytes = 0;
};

using StorageOf = std::function<model::Storage(model::WeightId)>;

WeightLayout weight_layout(const model::Dims& dims, model::WeightId id, model::Storage storage);

// Bits of a linear weight's codes, the kernels' kBits; 16 for bf16.
int code_bits(model::Storage storage);

}  // namespace lily::metal
