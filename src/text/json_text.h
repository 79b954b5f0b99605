// JSON as the chat template writes it: byte for byte what Python's json.dumps(ensure_ascii=False) makes of
// what json.loads read, since the model was trained on prompts rendered so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace lily::text {

using nlohmann::ordered_json;

// Reads one JSON document; nothing if it is not one. Keys keep their order; of equal keys the last value
// counts, at the place of the first. Integers beyond 64 bits keep their digits: they are held as a binary
// value that only dump_json understands. Linear in the text, and nesting costs no stack. What is nested
// deeper than max_depth is none.
std::optional<ordered_json> parse_json(std::string_view text, size_t max_depth = SIZE_MAX);

// Of values from clients and from the model: who reads them, the JSON library among others, recurses.
inline constexpr size_t kMaxValueDepth = 512;

// Separators ", " and ": ", non-ASCII and <>&' unescaped, floats as Python's repr writes them.
std::string dump_json(const ordered_json& value);
void dump_json_append(const ordered_json& value, std::string& out);

// The inside of a JSON string literal, without the quotes. Invalid UTF-8 passes as it is.
void escape_json_append(std::string_view text, std::string& out);

}  // namespace lily::text
