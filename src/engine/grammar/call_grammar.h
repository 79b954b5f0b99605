// The text of a tool call between <tool_call> and </tool_call>, as a grammar.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>

#include "engine/chat_request.h"
#include "engine/grammar/grammar.h"
#include "engine/grammar/schema_compiler.h"

namespace lily::engine::grammar {

// Of all functions of a request together.
inline constexpr SchemaLimits kCallLimits = {.max_places = 40'000,
                                             .max_dfa_states = 240'000,
                                             .max_work = 2'000'000,
                                             .max_pattern_steps = 2 * kPatternSteps};

// A call of one of the functions, or of `name` if it is not empty: declared parameters in any order, each at
// most once, required ones always. Values of a function with "strict": true fit their schemas, those of
// others are free text. Throws Error(Fault::user) for strict schemas that are not supported, naming the
// tool's place and the one in its schema.
Grammar call_grammar(const nlohmann::ordered_json& tools, std::string_view name,
                     std::span<const ToolPlace> places = {}, const SchemaLimits& limits = kCallLimits);

// Some function of the tools has "strict": true.
bool any_strict(const nlohmann::ordered_json& tools);

}  // namespace lily::engine::grammar
