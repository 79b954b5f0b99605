// What every backend relies on in the inputs of a step.
#pragma once

#include "backend/backend.h"

namespace lily::backend {

// Inputs outside the bounds of the plan or of what was reserved are our own mistake (LILY_CHECK): an index
// that passes would read or write memory of another sequence.
void check_step(const StepInputs& inputs, const plan::Plan& plan, const MemorySpec& memory);

}  // namespace lily::backend
