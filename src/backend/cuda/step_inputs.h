// StepInputs on their way to the device: checked, spread to rows in pinned memory, copied in one piece. A
// program has two of these, for the two steps that may be in flight.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/buffer.h"
#include "backend/cuda/kernels/step.h"
#include "backend/cuda/memory.h"
#include "plan/plan.h"

namespace lily::cuda {

class StepBuffer {
 public:
  StepBuffer(const plan::Plan& plan, const Memory& memory);

  // Checks the inputs and copies them to the device. Waits for the copy: the host has the time of the step
  // in front for that, where a wait of the device would stand between two steps. `serial` comes back in
  // TokenReports.
  void fill(const backend::StepInputs& inputs, const Stream& stream, uint32_t serial);

  const StepView& view() const { return view_; }
  int n_rows() const { return n_rows_; }
  int n_outputs() const { return n_outputs_; }
  int n_tokens() const { return n_tokens_; }
  const std::vector<backend::Segment>& segments() const { return segments_; }
  bool one_row_each() const;  // every segment has one row

 private:
  const plan::Plan& plan_;
  const backend::MemorySpec memory_;
  size_t n_bytes_ = 0;
  PinnedMemory pinned_;
  DeviceMemory device_, rope_;
  StepView view_{};  // device pointers
  StepView host_{};  // the same places in pinned memory
  int n_rows_ = 0, n_outputs_ = 0, n_tokens_ = 0, max_blocks_ = 0;
  std::vector<backend::Segment> segments_;
};

}  // namespace lily::cuda
