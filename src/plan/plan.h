// A plan: the list of ops of one phase for one shape class, with its values and their places in scratch
// memory.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "model/dims.h"
#include "plan/op.h"
#include "plan/policy.h"

namespace lily::plan {

enum class Phase : uint8_t { prefill, decode };

// What the last op of a step leaves behind.
enum class Ending : uint8_t {
  none,        // a prompt chunk that is not the last: no head at all
  logits,      // whole rows of logits
  candidates,  // TopCandidates
  greedy,      // GreedyToken
  sampled,     // SampleToken
};

// Bounds; a program made for a shape serves every step within them.
struct Shape {
  Phase phase = Phase::decode;
  int rows = 1;            // rows of the step
  int outputs = 1;         // rows whose logits are wanted; 0 with Ending::none
  int64_t context = 4096;  // tokens in the longest sequence, this step's included
  Ending ending = Ending::logits;
  bool operator==(const Shape&) const = default;
};

struct Options {
  // Every value keeps a place of its own and is not overwritten, residuals included: for diff and tests.
  bool keep_values = false;
  int n_candidates = 64;  // for Ending::candidates
};

// Where a value lies in the scratch arena. Values whose lives do not overlap in stages share bytes.
struct Placement {
  int64_t offset = 0;  // bytes, a multiple of 256
  int64_t bytes = 0;
};

struct Plan {
  model::Dims dims;
  Shape shape;
  Policy policy;
  Options options;
  std::vector<Value> values{};  // by ValueId
  std::vector<Op> ops{};        // in an order that is correct when run one after another
  std::vector<int>
      stage{};  // [ops]: ops of one stage do not depend on each other; never falls along the list
  std::vector<Placement> placement{};  // by ValueId
  int64_t scratch_bytes = 0;

  const Value& value(ValueId id) const { return values[static_cast<size_t>(id)]; }
  int n_stages() const { return stage.empty() ? 0 : stage.back() + 1; }
};

// The rows a value can have under the plan's bounds.
int64_t rows_bound(const Plan& plan, const Value& value);

// The actual rows of a row space in a step of n_rows rows and n_outputs outputs (blocks: the bound).
int64_t rows_in_step(const Plan& plan, RowSpace space, int n_rows, int n_outputs);

// The whole plan: ops, stages, placement. plan/forward.cc is the file to read first.
Plan forward(const model::Dims& dims, const Shape& shape, const Policy& policy, const Options& options = {});

// Fills stage, placement and scratch_bytes of a hand-made list of values and ops.
void schedule(Plan& plan);

// The same plan with fused ops replaced by the simple ops they stand for; value ids stay, temporaries are
// appended.
Plan expanded(const Plan& plan);

}  // namespace lily::plan
