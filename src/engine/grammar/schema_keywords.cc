#include "engine/grammar/schema_keywords.h"

#include <algorithm>
#include <array>
#include <set>

#include "base/error.h"

namespace lily::engine::grammar {
namespace {

constexpr size_t kMaxPrinted = 160;          // bytes of a client's text in a message
constexpr int64_t kMaxSize = 1'000'000'000;  // of lengths and counts

constexpr std::array kTypeNames = {
    std::pair{"null", uint32_t{kNullType}},       std::pair{"boolean", uint32_t{kBooleanType}},
    std::pair{"integer", uint32_t{kIntegerType}}, std::pair{"number", uint32_t{kNumberType | kIntegerType}},
    std::pair{"string", uint32_t{kStringType}},   std::pair{"array", uint32_t{kArrayType}},
    std::pair{"object", uint32_t{kObjectType}}};

uint32_t type_named(const ordered_json& name) {
  if (!name.is_string()) return 0;
  for (const auto& [text, bits] : kTypeNames)
    if (name.get_ref<const std::string&>() == text) return bits;
  return 0;
}

enum class Value : uint8_t {
  any,
  text,
  size,
  number,
  schema,
  schemas,
  schema_map,
  names,
  boolean,
  type,
  values
};

struct Keyword {
  const char* name;
  Value value;
};
// Those that have an effect.
constexpr std::array kSupported = {
    Keyword{"type", Value::type},
    Keyword{"nullable", Value::boolean},
    Keyword{"enum", Value::values},
    Keyword{"const", Value::any},
    Keyword{"anyOf", Value::schemas},
    Keyword{"oneOf", Value::schemas},
    Keyword{"allOf", Value::schemas},
    Keyword{"$ref", Value::text},
    Keyword{"properties", Value::schema_map},
    Keyword{"required", Value::names},
    Keyword{"additionalProperties", Value::schema},
    Keyword{"minProperties", Value::size},
    Keyword{"maxProperties", Value::size},
    Keyword{"items", Value::schema},
    Keyword{"prefixItems", Value::schemas},
    Keyword{"minItems", Value::size},
    Keyword{"maxItems", Value::size},
    Keyword{"minLength", Value::size},
    Keyword{"maxLength", Value::size},
    Keyword{"pattern", Value::text},
    Keyword{"format", Value::text},
    Keyword{"minimum", Value::number},
    Keyword{"maximum", Value::number},
    Keyword{"exclusiveMinimum", Value::number},
    Keyword{"exclusiveMaximum", Value::number},
    Keyword{"multipleOf", Value::number},
};
// Those that say nothing about the value.
constexpr std::array kAnnotations = {"$schema",
                                     "$comment",
                                     "$defs",
                                     "definitions",
                                     "$id",
                                     "title",
                                     "description",
                                     "default",
                                     "examples",
                                     "example",
                                     "deprecated",
                                     "readOnly",
                                     "writeOnly",
                                     "discriminator",
                                     "contentMediaType",
                                     "contentEncoding",
                                     "contentSchema",
                                     "externalDocs",
                                     "xml"};

const char* reason(const Keyword& keyword, const ordered_json& value) {
  const auto is_schema = [](const ordered_json& v) { return v.is_object() || v.is_boolean(); };
  switch (keyword.value) {
    case Value::any:
      return nullptr;
    case Value::text:
      return value.is_string() ? nullptr : "it must be a string";
    case Value::size: {
      const bool whole =
          value.is_number_integer() ||
          (value.is_number_float() && value.get<double>() == std::clamp(value.get<double>(), 0.0, 1e9) &&
           value.get<double>() == static_cast<double>(value.get<int64_t>()));
      const bool good =
          whole && (value.is_number_unsigned() || value.get<double>() >= 0) && value.get<double>() <= 1e9;
      return good ? nullptr : "it must be a whole number from 0 to 1,000,000,000";
    }
    case Value::number:
      return value.is_number() ? nullptr : "it must be a number";
    case Value::schema:
      if (value.is_array()) return "a list of schemas is not supported here; use prefixItems";
      return is_schema(value) ? nullptr : "it must be a schema";
    case Value::schemas:
      return value.is_array() && !value.empty() ? nullptr
                                                : "it must be a list of schemas, and not an empty one";
    case Value::schema_map:
      return value.is_object() ? nullptr : "it must be an object";
    case Value::names:
      return value.is_array() &&
                     std::all_of(value.begin(), value.end(), [](const auto& v) { return v.is_string(); })
                 ? nullptr
                 : "it must be a list of names";
    case Value::boolean:
      return value.is_boolean() ? nullptr : "it must be true or false";
    case Value::values:
      return value.is_array() && !value.empty() ? nullptr
                                                : "it must be a list of values, and not an empty one";
    case Value::type: {
      const bool good = value.is_array()
                            ? !value.empty() && std::all_of(value.begin(), value.end(),
                                                            [](const auto& v) { return type_named(v) != 0; })
                            : type_named(value) != 0;
      return good ? nullptr
                  : "it must be one of null, boolean, integer, number, string, array, object, or a list of "
                    "them";
    }
  }
  return nullptr;
}

}  // namespace

const ordered_json* member(const ordered_json& schema, const char* key) {
  const auto at = schema.find(key);
  return at == schema.end() ? nullptr : &*at;
}

uint32_t type_of(const ordered_json& value) {
  switch (value.type()) {
    case ordered_json::value_t::null:
      return kNullType;
    case ordered_json::value_t::boolean:
      return kBooleanType;
    case ordered_json::value_t::string:
      return kStringType;
    case ordered_json::value_t::array:
      return kArrayType;
    case ordered_json::value_t::object:
      return kObjectType;
    case ordered_json::value_t::number_float:
      return value.get<double>() ==
                     static_cast<double>(static_cast<int64_t>(std::clamp(value.get<double>(), -1e15, 1e15)))
                 ? kIntegerType
                 : kNumberType;
    default:
      return kIntegerType;
  }
}

std::optional<uint32_t> stated_types(const ordered_json& schema) {
  const auto at = schema.find("type");
  if (at == schema.end()) return std::nullopt;
  uint32_t types = 0;
  if (at->is_array())
    for (const ordered_json& name : *at) types |= type_named(name);
  else types = type_named(*at);
  const auto nullable = schema.find("nullable");
  if (nullable != schema.end() && nullable->is_boolean() && nullable->get<bool>()) types |= kNullType;
  return types;
}

uint32_t hinted_types(const ordered_json& schema) {
  uint32_t types = 0;
  const auto hint = [&](uint32_t type, std::initializer_list<const char*> keys) {
    for (const char* key : keys)
      if (schema.contains(key)) types |= type;
  };
  hint(kObjectType, {"properties", "required", "additionalProperties", "minProperties", "maxProperties"});
  hint(kArrayType, {"items", "prefixItems", "minItems", "maxItems"});
  hint(kStringType, {"minLength", "maxLength", "pattern", "format"});
  hint(kNumberType | kIntegerType,
       {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"});
  return types;
}

int64_t size_keyword(const ordered_json& schema, const char* key, int64_t otherwise) {
  const auto at = schema.find(key);
  if (at == schema.end()) return otherwise;
  return std::min(static_cast<int64_t>(at->get<double>()), kMaxSize);
}

std::string printable(std::string_view text) {
  const bool is_cut = text.size() > kMaxPrinted;
  size_t end = is_cut ? kMaxPrinted : text.size();
  while (is_cut && end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  std::string out;
  for (const char c : text.substr(0, end)) out += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
  return is_cut ? out + "..." : out;
}

std::optional<BadKeyword> bad_keyword(const ordered_json& schema) {
  for (const auto& [name, value] : schema.items()) {
    const auto supported =
        std::find_if(kSupported.begin(), kSupported.end(), [&](const Keyword& k) { return name == k.name; });
    if (supported != kSupported.end()) {
      if (const char* why = reason(*supported, value)) return BadKeyword{name, why};
      continue;
    }
    const bool says_nothing =
        std::find(kAnnotations.begin(), kAnnotations.end(), name) != kAnnotations.end() ||
        name.starts_with("x-") || (name == "uniqueItems" && value == false);
    if (!says_nothing) return BadKeyword{name, "this keyword is not supported"};
  }
  return std::nullopt;
}

}  // namespace lily::engine::grammar
