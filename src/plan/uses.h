// What an op touches: the one source for hazards, declared accesses and byte counts.
#pragma once

#include <vector>

#include "plan/op.h"

namespace lily::plan {

enum class Resource : uint8_t {
  value,        // id: ValueId
  weight,       // weight_id
  conv_state,   // layer: slot src is read, slot dst written
  delta_state,  // layer: slot src is read, slot dst written
  kv,           // layer: blocks of the step's sequences
  token_slot,   // the step's token slots
  step,         // StepInputs on the device
};

enum class Access : uint8_t { read, write, update /* reads, then writes */ };

struct Use {
  Resource resource = Resource::value;
  Access access = Access::read;
  ValueId value = kNoValue;
  WeightId weight{};
  int layer = model::kNoLayer;

  bool writes() const { return access != Access::read; }
  bool reads() const { return access != Access::write; }
};

std::vector<Use> uses(const Op& op);

}  // namespace lily::plan
