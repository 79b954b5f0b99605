// The figures of lily bench as a drawing.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace lily::cli {

// An SVG of tok/s over the length, one panel a phase, both axes logarithmic, with the spread of the rounds;
// the peer's figures too where there are some. `document` is what lily bench --json prints.
std::string plot_svg(const nlohmann::ordered_json& document);

// Text between tags.
std::string escaped(const std::string& text);

// Throws Error(Fault::user) if the file cannot be written.
void write_plot(const nlohmann::ordered_json& document, const std::string& path);

}  // namespace lily::cli
