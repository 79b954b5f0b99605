// A plan made executable. A decode step is one CUDA graph, captured when a number of rows is first seen and
// replayed from then on; chunks of prompts are launched kernel by kernel. Ids travel from step to step on the
// device; the last kernel stores a copy in the host's memory, which the host waits for one step late if it
// likes. So nothing stands between the graphs of two steps: neither a copy nor an event.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/lower.h"

namespace lily::cuda {

class CudaProgram final : public backend::Program {
 public:
  // All references outlive the program.
  CudaProgram(plan::Plan plan, const Weights& weights, const Memory& memory, const Stream& stream, int n_sms,
              bool has_wgmma);
  ~CudaProgram() override;

  const plan::Plan& plan() const override { return plan_; }
  void submit(const backend::StepInputs& inputs) override;
  backend::StepOutputs wait() override;
  std::vector<float> read(plan::ValueId value) override;
  void write(plan::ValueId value, std::span<const float> data) override;
  void run_ops(const backend::StepInputs& inputs, int first, int last) override;

 private:
  // One of the two steps in flight.
  struct Slot {
    Slot(const plan::Plan& plan, const Memory& memory) : step(plan, memory) {}
    StepBuffer step;
    Event done;            // of steps that do not report tokens
    PinnedMemory outputs;  // TokenReports, or as collect() places them
    uint32_t serial = 0;   // of the step
    bool reports = false;
    std::vector<int32_t> tokens;  // reported
    backend::StepOutputs view;
    std::map<std::tuple<int, int, int>, cudaGraphExec_t> graphs;  // by rows, outputs, n_tokens
  };

  Run run_of(const Slot& slot, bool alone) const;
  void launch(Slot& slot);
  void collect(Slot& slot);
  void await_reports(Slot& slot) const;

  const plan::Plan plan_;
  const Weights& weights_;
  const Memory& memory_;
  const Stream& stream_;
  Stream copies_;
  const int n_sms_;
  const bool has_wgmma_;
  Extra extra_;
  DeviceMemory arena_;
  std::array<std::unique_ptr<Slot>, 2> slots_;
  int64_t n_submitted_ = 0, n_waited_ = 0;
  int rows_ = 0, outputs_ = 0;  // of the last step
};

}  // namespace lily::cuda
