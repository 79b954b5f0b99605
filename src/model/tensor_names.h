// Names as converters write them, brought to the one spelling of the catalogue.
#pragma once

#include <string>
#include <string_view>

namespace lily::model {

enum class NameClass { text, vision, mtp };

NameClass name_class(std::string_view name);

// "language_model.model.X" and "model.language_model.X" become "model.X", "language_model.lm_head.X" becomes
// "lm_head.X"; anything else stays. Works for tensors and for the module paths of quantisation overrides.
std::string normalised_name(std::string_view name);

}  // namespace lily::model
