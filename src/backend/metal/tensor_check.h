// Whether the tensor operations of this GPU compute what its simdgroup matrices do: run once, before they are
// used for anything.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "backend/metal/device.h"

namespace lily::metal {

// Small products of known numbers by both libraries. What is wrong, or nothing. Throws Error(Fault::device)
// if a kernel cannot be made or does not run.
std::optional<std::string> tensor_fault(Device& gpu, Library& simdgroup, Library& tensor, int64_t timeout_ms);

}  // namespace lily::metal
