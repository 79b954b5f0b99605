// Ops to dispatches: the one place that knows which kernel computes which op, on which grid, with which
// arguments. Pure: it needs no GPU, so `lily plan` can show what a plan costs on a Mac from anywhere.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/metal/dispatch.h"
#include "backend/metal/weight_layout.h"
#include "plan/plan.h"

namespace lily::metal {

// A value that the host reads after the step.
struct Result {
  plan::ValueId value;
  int64_t offset = 0, bytes = 0;  // in the result buffer
};

struct LoweredOp {
  std::vector<Dispatch> dispatches;  // by rising phase
  int n_phases = 1;
  bool on_host = false;  // ExpertGroups without P2: the CPU does it between two command buffers
};

struct Lowered {
  std::vector<LoweredOp> ops;  // [plan ops]
  std::vector<Result> results;
  int64_t result_bytes = 0;
  int64_t work_bytes = 0;
};

// Throws Error(Fault::user) if these kernels cannot keep keys and values in the policy's type.
void check_kv_type(const plan::Policy& policy);

// Throws Error(Fault::user) for a policy that these kernels cannot follow, naming the field.
Lowered lower(const plan::Plan& plan, const StorageOf& storage = {});

// One barrier-free run of dispatches: op and dispatch indices.
struct Group {
  struct Item {
    int op, dispatch;
  };
  std::vector<Item> items;
  int on_host = -1;  // an op that the CPU does instead
};

// The dispatches of ops [first, last) in groups; a barrier stands between two groups and nowhere else.
std::vector<Group> groups(const plan::Plan& plan, const Lowered& lowered, int first, int last);

// What a step of the plan encodes.
struct Counts {
  int launches = 0;
  int stages = 0;    // groups
  int barriers = 0;  // inside encoders
};
Counts dispatches(const plan::Plan& plan, const StorageOf& storage = {});

// Where a value is.
Place place_of(const plan::Plan& plan, const Lowered& lowered, plan::ValueId value);

// What Apple GPUs do by default (docs/performance/metal.md).
plan::Policy default_policy();

}  // namespace lily::metal
