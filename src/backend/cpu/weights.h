// The model's weights in memory, packed for the kernels while they are read; the file's layout never exists
// whole.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/kernels/linear.h"
#include "base/page_block.h"
#include "base/thread_pool.h"
#include "model/checkpoint.h"

namespace lily::backend::cpu {

// A linear weight: n_matrices (experts; else 1) matrices of one shape.
struct PackedWeight {
  TileMatrix first;
  int64_t n_matrices = 1;
  TileMatrix matrix(int64_t i) const {
    TileMatrix m = first;
    m.tiles += i * m.n_tiles() * m.tile_bytes;
    return m;
  }
};

class Weights {
 public:
  // Shapes alone, stored as published: lowering with them tells what a program would need. Nothing may be
  // read.
  explicit Weights(const model::Dims& dims);
  Weights(const model::Checkpoint& checkpoint, ThreadPool& pool, const backend::Progress& progress);

  const model::Dims& dims() const { return dims_; }
  const PackedWeight& linear(model::WeightId id) const;
  std::span<const float> vector(model::WeightId id) const;  // norms, A_log, dt_bias; conv as [4, channels]
  int64_t n_bytes() const { return n_bytes_; }

 private:
  size_t index(model::WeightId id) const;

  model::Dims dims_;
  std::vector<PageBlock> blocks_;     // of the linear weights
  std::vector<PackedWeight> linear_;  // by index()
  std::vector<std::vector<float>> vectors_;
  int64_t n_bytes_ = 0;
};

}  // namespace lily::backend::cpu
