// The gains of lily ablate as a drawing.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace lily::cli {

// `rows`: the document of lily ablate. One bar a measured mechanism, with the spread of its rounds.
std::string gains_svg(const nlohmann::ordered_json& rows, const std::string& device);
// Throws Error(Fault::user) naming the file if it cannot be written.
void write_gains(const nlohmann::ordered_json& rows, const std::string& device, const std::string& path);

}  // namespace lily::cli
