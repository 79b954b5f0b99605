// Request fields that OpenAI's endpoints have in common.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "server/body.h"
#include "server/dialect.h"

namespace lily::server {

// temperature, top_p, top_k, min_p, penalties, seed, logit_bias.
engine::SamplingOverrides parse_sampling(Body& body, const ServedModel& model);
// A string or up to 16 of them.
std::vector<std::string> parse_stop(Body& body, const char* name);
// Functions with names of their own; null if there are none. Both {"type": "function", "function": {...}} and
// the flat form of the Responses API are read; the result has the first.
Json parse_functions(const Json& tools, const std::string& path);
// auto, none, required (any), or a function's name in one of the forms in use.
engine::ToolChoice parse_tool_choice(Body& body, const Json& tools);
// {"type": "text" | "json_object" | "json_schema", ...}; the schema inside or flat.
engine::OutputFormat parse_format(Body format);
// none, minimal, low, medium, high, xhigh.
void apply_effort(const std::string& effort, const std::string& path, engine::Thinking& thinking);

}  // namespace lily::server
