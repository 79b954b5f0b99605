// Finds every weight of the catalogue among the tensors of the files.
#pragma once

#include <vector>

#include "model/checkpoint.h"
#include "model/shards.h"

namespace lily::model {

// Fills the report's tensors, sums and classes (its config must be there), and returns the weights by
// weight_index(). What is missing, of the wrong shape or type, not supported or unused is added to
// `problems`.
std::vector<StoredWeight> match_weights(const Shards& shards, CheckpointReport& report,
                                        std::vector<Problem>& problems);

}  // namespace lily::model
