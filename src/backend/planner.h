// What is known of a backend without its device: so `lily plan` shows from anywhere what a GPU will be given.
// A backend that launches kernels one by one has a planner; where an op is simply called, the plan's own ops
// and stages are the answer.
#pragma once

#include <string_view>

#include "backend/backend.h"

namespace lily::backend {

// What one step of a plan encodes.
struct Launches {
  int launches = 0;  // of kernels
  int stages = 0;    // runs of launches that may overlap
  int barriers = 0;  // between them
};

struct Planner {
  std::string_view backend;  // "metal"
  plan::Policy (*policy)(const model::Dims& dims, const DeviceOptions& options);
  // `storage` says how weights are stored, empty: as published. Throws Error(Fault::user) for a policy that
  // the backend's kernels cannot follow.
  Launches (*launches)(const plan::Plan& plan, const std::function<model::Storage(model::WeightId)>& storage);
};

// Of a backend's name, whether or not its device is here; an emulated one plans as the real one. Null: none.
const Planner* find_planner(std::string_view backend);

}  // namespace lily::backend
