// Runs one plan on two backends op by op and names the first op, coordinate and values that differ: `lily
// diff`.
//
// The whole step runs on the candidate, every value kept. Then each op by itself: its inputs are copied from
// the candidate into the other backend's program, the op runs there, and what both wrote is compared. So an
// error shows at the op that makes it, and is not carried on.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>

#include "backend/backend.h"
#include "plan/plan.h"

namespace lily::engine {

struct Difference {
  std::string op;     // "experts_gate_up"
  std::string value;  // "layers.3.experts_mid", "layers.2.delta_state", "layers.3.k"
  int64_t row = 0, col = 0;
  float candidate = 0, reference = 0;
  double error = 0, tolerance = 0;
  double share() const;      // of its tolerance
  std::string line() const;  // one line for people
};

struct DiffOptions {
  plan::Phase phase = plan::Phase::prefill;
  std::string until;                  // the last value to compare, "layers.3.router_logits"; empty: all
  std::function<void()> between_ops;  // may throw, which ends it all
  std::function<bool(const plan::Op&)> compares;  // the other ops run on the candidate alone; empty: all do
};

// What was found of one kind of op.
struct OpReport {
  int n_ops = 0;
  int64_t n_values = 0;
  std::optional<Difference> first, worst;  // as in DiffReport
};

struct DiffReport {
  int n_ops = 0;
  int64_t n_values = 0;             // numbers compared
  std::optional<Difference> first;  // the first one above its tolerance
  std::optional<Difference> worst;  // the largest share of its tolerance
  std::map<std::string, OpReport> by_op;
};

// Both devices are loaded with the same checkpoint; their memory is reserved anew. Prefill: `tokens` are one
// prompt chunk. Decode: all but the last are read first, and the step of the last one is compared. Throws
// Error(Fault::user) if `until` names no value of the plan.
DiffReport diff(backend::Device& candidate, backend::Device& reference, const model::Dims& dims,
                const plan::Policy& policy, std::span<const int32_t> tokens, const DiffOptions& options = {});

// One step of a plan that keeps its values, on two devices whose memory is reserved and holds the same.
// What both wrote to caches is then the candidate's.
DiffReport compare_step(backend::Device& candidate, backend::Device& reference, const plan::Plan& plan,
                        const backend::StepInputs& inputs, const DiffOptions& options = {});

}  // namespace lily::engine
