// How far the recurrence (19) in fp32 may be from the reference's: a bound that follows the step's own
// numbers.
//
// A single sum loses what its terms' size says. Here each row's result is a sum over a state that all rows
// before it have rounded, and it may be far smaller than that state; so neither the size of the results nor
// one sum's roundings say how far two correct computations are apart.
#pragma once

#include <vector>

#include "backend/backend.h"
#include "plan/plan.h"

namespace lily::test {

// Six deviations of each value of o, [rows, value width]. `reference` has run the op, on the state that the
// slots `src` of `device` still hold.
std::vector<double> delta_rule_error(const plan::Plan& plan, const plan::DeltaRule& op,
                                     const backend::StepInputs& inputs, backend::Program& reference,
                                     backend::Device& device);

}  // namespace lily::test
