// A plan made executable on a GPU: lowered once, encoded each step into a command buffer with one concurrent
// encoder and the barriers that the plan's stages ask for. Two steps may be in flight; each has its own step
// inputs and result buffer, and raises the program's event when it is done.
#pragma once

#include <array>
#include <memory>
#include <set>
#include <vector>

#include "backend/backend.h"
#include "backend/metal/lower.h"
#include "backend/metal/metal_device.h"
#include "backend/metal/step.h"

namespace lily::metal {

class MetalProgram final : public backend::Program {
 public:
  MetalProgram(MetalDevice& device, plan::Plan plan);
  ~MetalProgram() override;

  const plan::Plan& plan() const override { return plan_; }
  void submit(const backend::StepInputs& inputs) override;
  backend::StepOutputs wait() override;
  std::vector<float> read(plan::ValueId value) override;
  void write(plan::ValueId value, std::span<const float> data) override;
  void run_ops(const backend::StepInputs& inputs, int first, int last) override;

  const Lowered& lowered() const { return lowered_; }
  // For tests of barrier placement: the barriers in front of these groups of every step are left out.
  void leave_out_barriers(std::set<int> groups) { left_out_ = std::move(groups); }

 private:
  struct Flight {
    std::unique_ptr<Buffer> step, results;
    std::span<std::byte> result_bytes;
    std::unique_ptr<CommandBuffer> command_buffer;
    uint64_t signal = 0;  // the event's value when the step is done
    StepSize size;
  };
  struct Where {
    const Buffer* buffer;
    size_t offset, length;
    size_t stride = 0, count = 1;  // as in Access
  };

  void check(const backend::StepInputs& inputs) const;
  Where where(const Place& place, const Flight& flight) const;
  // Encodes, commits, and raises the event to `signal`.
  void encode(Flight& flight, const std::vector<Group>& groups, uint64_t signal);
  void encode(Encoder& encoder, const Dispatch& dispatch, const Pipeline& pipeline, const Flight& flight);
  void group_experts(const plan::ExpertGroups& op, const Flight& flight);
  void finish(Flight& flight, uint64_t signal);
  backend::StepOutputs outputs(const Flight& flight) const;
  const Buffer& scratch() const { return own_scratch_ ? *own_scratch_ : device_.scratch(); }

  MetalDevice& device_;
  const plan::Plan plan_;
  const Lowered lowered_;
  const StepLayout layout_;
  StepWriter writer_;
  std::vector<Group> groups_;
  std::vector<std::vector<const Pipeline*>> pipelines_;  // [op][dispatch]
  std::unique_ptr<Buffer> own_scratch_;                  // where values are kept, else the device's
  std::unique_ptr<Event> event_;
  std::array<Flight, 2> flights_;
  std::vector<Access> accesses_;  // of the dispatch being encoded
  uint64_t n_submitted_ = 0, n_waited_ = 0, n_signalled_ = 0;
  int current_ = 0;  // the flight whose step was last
  std::set<int> left_out_;
};

}  // namespace lily::metal
