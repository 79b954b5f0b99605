// A step's inputs in GPU memory: where each part lies for the bounds of a plan, and how StepInputs get there.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "backend/metal/device.h"
#include "backend/metal/dispatch.h"
#include "backend/metal/memory.h"

namespace lily::metal {

class StepLayout {
 public:
  explicit StepLayout(const plan::Plan& plan);

  size_t bytes() const { return bytes_; }
  size_t offset(Place::Part part) const { return ranges_[static_cast<size_t>(part)].offset; }
  size_t length(Place::Part part) const { return ranges_[static_cast<size_t>(part)].length; }

 private:
  struct Range {
    size_t offset = 0, length = 0;
  };
  std::array<Range, 7> ranges_;
  size_t bytes_ = 0;
};

// The sizes of the step at hand; grids follow from them.
struct StepSize {
  uint32_t n_rows = 0, n_outputs = 0, n_segments = 0, n_query_tiles = 0;
  uint32_t n_tokens = 0;          // real ids of the vocabulary
  bool whole_vocabulary = false;  // an output samples beyond what is ranked
  uint32_t count(Extent::Count count) const;
};
Size3 grid_of(const Dispatch& dispatch, const StepSize& size);

// Writes inputs for the GPU; memory is allocated once.
class StepWriter {
 public:
  StepWriter(const plan::Plan& plan, const StepLayout& layout);
  // Of checked inputs (backend/step_checks.h), for slots and blocks in `memory`.
  StepSize write(const backend::StepInputs& inputs, const Memory& memory, Buffer& to);

 private:
  template <typename T>
  T* at(Place::Part part) {
    return reinterpret_cast<T*>(bytes_.data() + layout_.offset(part));
  }
  const plan::Plan& plan_;
  const StepLayout& layout_;
  std::vector<std::byte> bytes_;
};

}  // namespace lily::metal
