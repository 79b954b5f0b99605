// A plan, lowered and cut into intervals. submit() runs the step; wait() hands out what it left.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/executor.h"
#include "backend/cpu/kernels/targets.h"

namespace lily::backend::cpu {

// What programs need of Scratch.
struct ScratchSizes {
  int64_t value_bytes = 0;   // values and ops' extra memory
  int64_t worker_bytes = 0;  // of each thread
};
// On the instruction set in use (use_target).
ScratchSizes scratch_sizes(const plan::Plan& plan, const Weights& weights);

class CpuProgram final : public Program {
 public:
  // All references outlive the program. A plan that keeps its values has scratch memory of its own.
  CpuProgram(plan::Plan plan, const Weights& weights, Memory& memory, SimdTarget target, ThreadPool& pool,
             Scratch& shared, Trace* trace = nullptr);

  const plan::Plan& plan() const override { return plan_; }
  void submit(const StepInputs& inputs) override;
  StepOutputs wait() override;
  std::vector<float> read(plan::ValueId value) override;
  void write(plan::ValueId value, std::span<const float> data) override;
  void run_ops(const StepInputs& inputs, int first, int last) override;

 private:
  struct Outputs {
    std::vector<float> logits, candidate_logits, logsumexp;
    std::vector<int32_t> tokens, candidate_ids;
    StepOutputs view;
  };

  void run_traced();
  void collect(Outputs& out) const;
  void copy_masked_logits(plan::ValueId logits, Outputs& out) const;

  const plan::Plan plan_;
  const SimdTarget target_;
  std::vector<Lowered> lowered_;     // [ops]
  std::vector<Interval> intervals_;  // of the whole step
  std::unique_ptr<Scratch> own_scratch_;
  Scratch& scratch_;
  Step step_;
  Executor executor_;
  Trace* const trace_;
  std::vector<std::string> interval_names_;                 // with a trace: "norm_linear + router"
  std::vector<Executor::Clock::time_point> interval_ends_;  // with a trace
  std::array<Outputs, 2> outputs_;                          // a step's stay until the second step after it
  int n_submitted_ = 0, n_waited_ = 0;
};

}  // namespace lily::backend::cpu
