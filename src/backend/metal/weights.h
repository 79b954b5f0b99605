// The checkpoint's weights in GPU memory: buffers of at most 4 GiB that CPU and GPU share, cut between
// weights. Codes, scales and biases stay as they are in the file.
#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "backend/metal/device.h"
#include "backend/metal/weight_layout.h"
#include "model/checkpoint.h"

namespace lily::metal {

class Weights {
 public:
  // Reads the checkpoint once, straight into the buffers. Throws Error(Fault::device) if the GPU cannot hold
  // them, naming both sizes, and Error(Fault::user) if `progress` cancels.
  Weights(Device& gpu, const model::Checkpoint& checkpoint, const backend::Progress& progress,
          size_t max_buffer_bytes = size_t{4} << 30);

  struct Range {
    const Buffer* buffer;
    size_t offset;
    WeightLayout layout;
  };
  const Range& range(model::WeightId id) const;
  model::Storage storage(model::WeightId id) const { return range(id).layout.storage; }
  int64_t n_bytes() const { return n_bytes_; }

 private:
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<std::vector<Range>> by_kind_;  // [weight kind][layer + 1]
  int64_t n_bytes_ = 0;
};

}  // namespace lily::metal
