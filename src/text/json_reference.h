// References inside a JSON schema: "#", "#/$defs/name".
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string_view>

namespace lily::text {

// Whether it points into the document it stands in, by a path.
bool is_local_reference(std::string_view reference);

// What a local reference points at, with ~0, ~1 and %XX of its path undone; null if there is nothing.
const nlohmann::ordered_json* resolve_reference(const nlohmann::ordered_json& root,
                                                std::string_view reference);

}  // namespace lily::text
