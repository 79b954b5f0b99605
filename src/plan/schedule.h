// Hazards, stages and places: what makes a list of ops safe to run concurrently.
#pragma once

#include <vector>

#include "plan/plan.h"

namespace lily::plan {

// An op that must wait for an earlier one.
struct Edge {
  int from = 0, to = 0;  // from < to
  enum class Why : uint8_t { read_after_write, write_after_read, write_after_write } why;
};

// All hazards between ops through the resources that uses() declares, less those that follow from others of
// the list by way of a third op. Scratch memory shared between values adds none: values share bytes only
// across stages.
std::vector<Edge> edges(const std::vector<Op>& ops);

// Stage of each op: the longest chain of edges before it. With concurrent false, every op has a stage of its
// own. Stages never fall along the list, because ops are reordered to rise: `ops` is sorted by stage, keeping
// order inside.
std::vector<int> stages(std::vector<Op>& ops, bool concurrent);

}  // namespace lily::plan
