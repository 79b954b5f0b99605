// What a request's tools say about the types of their parameters, and typed JSON from the text a model writes
// for one.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace lily::text {

// Types that a parameter may have, as a set.
enum JsonTypes : uint8_t {
  kUntyped = 0,  // the schema does not say: values stay strings
  kInteger = 1,
  kNumber = 2,
  kBoolean = 4,
  kNull = 8,
  kObject = 16,
  kArray = 32,
  kString = 64,
};

// The declared functions of a request. Immutable; any thread.
class ToolSet {
 public:
  using Parameters = std::map<std::string, uint8_t, std::less<>>;  // name -> JsonTypes

  ToolSet() = default;
  // `tools`: an array of {"type": "function", "function": {"name", "parameters"}}, or null. Anything in a
  // schema that is not understood leaves its parameter untyped.
  explicit ToolSet(const nlohmann::ordered_json& tools);

  bool empty() const { return functions_.empty(); }
  // Null if no such function is declared.
  const Parameters* find(std::string_view function) const;

 private:
  std::map<std::string, Parameters, std::less<>> functions_;
};

// The types that a schema allows: `type` (one or a list), $ref into `root`, anyOf and oneOf (union), allOf
// (intersection), enum and const; without these, `properties` means object and `items` array.
uint8_t schema_types(const nlohmann::ordered_json& schema, const nlohmann::ordered_json& root);

// True if the value is a JSON string whatever it says, so that it can be passed on while it is written.
inline bool is_plain_string(uint8_t types) { return types == kUntyped || types == kString; }

// Appends the value as JSON. Types are tried in the order integer, number, boolean, null, object or array;
// what fits none of the allowed ones becomes a string as written. Numbers and structures keep their spelling.
void append_typed_value(std::string_view value, uint8_t types, std::string& out);

}  // namespace lily::text
