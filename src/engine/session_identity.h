// What the state after some tokens depends on beside the tokens.
#pragma once

#include <string>

#include "engine/load.h"
#include "model/checkpoint.h"

namespace lily::engine {

// 64 digits: checkpoint, tokenizer, chat template, the program's build, the device's arithmetic and all of
// the policy. A saved session with another identity is not used.
std::string session_identity(const model::Checkpoint& checkpoint, const backend::DeviceInfo& device,
                             const plan::Policy& policy, const std::string& build);

}  // namespace lily::engine
