// The model's weights on the device: 4-bit linear weights as pack/mma_q4.h's records, the embedding and the
// 8-bit router in the file's layout, small vectors in fp32 (the convolution in bf16).
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/buffer.h"
#include "base/thread_pool.h"
#include "model/checkpoint.h"

namespace lily::cuda {

struct DeviceWeight {
  int64_t n_matrices = 1, out = 0, in = 0;
  const std::byte* records = nullptr;  // q4: matrices one after another
  // In the file's layout: the embedding (q4), router and shared gate (q8).
  const std::byte* codes = nullptr;
  const uint16_t *scales = nullptr, *biases = nullptr;
  const float* vector = nullptr;   // norms, A_log, dt_bias
  const uint16_t* bf16 = nullptr;  // conv: [channels][4]
};

class Weights {
 public:
  // Reads, copies and repacks in a pipeline: pool threads read into pinned memory while the device works on
  // the slab before.
  Weights(const model::Checkpoint& checkpoint, ThreadPool& pool, const backend::Progress& progress);

  const model::Dims& dims() const { return dims_; }
  const DeviceWeight& get(model::WeightId id) const;
  const double* rope_frequency() const { return rope_frequency_.get<double>(); }  // [32]

 private:
  model::Dims dims_;
  std::vector<DeviceMemory> memory_;
  std::vector<DeviceWeight> weights_;  // by model::weight_index
  DeviceMemory rope_frequency_;
};

}  // namespace lily::cuda
