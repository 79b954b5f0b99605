// A plan as text: one line an op, so that a change to ops, barriers or bytes shows in a diff.
#pragma once

#include <string>

#include "plan/cost.h"
#include "plan/plan.h"

namespace lily::plan {

// "stage  kind  weights  inputs -> outputs  bytes  flops", one op a line, a bar between stages.
std::string list(const Plan& plan, const Workload& workload);

// The kind of an op and the layer that it is of, for a trace: "delta_update, layer 3".
std::string label(const Op& op);

}  // namespace lily::plan
