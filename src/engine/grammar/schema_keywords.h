// What single keywords of a JSON schema say.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace lily::engine::grammar {

using nlohmann::ordered_json;

// Types as a set. A number includes integers.
enum TypeBits : uint32_t {
  kNullType = 1,
  kBooleanType = 2,
  kIntegerType = 4,
  kNumberType = 8,
  kStringType = 16,
  kArrayType = 32,
  kObjectType = 64,
  kAllTypes = 127,
};

// The value of a key; null if the object has none.
const ordered_json* member(const ordered_json& schema, const char* key);
uint32_t type_of(const ordered_json& value);
// By `type` and `nullable`; nothing if the schema does not say.
std::optional<uint32_t> stated_types(const ordered_json& schema);
// The types that its other keywords speak of; 0: none.
uint32_t hinted_types(const ordered_json& schema);
int64_t size_keyword(const ordered_json& schema, const char* key, int64_t otherwise);
// Text of a client that is fit for a message: short, on one line.
std::string printable(std::string_view text);

// Why the keywords of a schema object cannot be used: the keyword and the reason; nothing if they can.
struct BadKeyword {
  std::string keyword, reason;
};
std::optional<BadKeyword> bad_keyword(const ordered_json& schema);

}  // namespace lily::engine::grammar
