#include "text/tool_schema.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/ascii.h"
#include "text/json_reference.h"
#include "text/json_text.h"

namespace lily::text {
namespace {

constexpr int kMaxDepth = 32;      // of references and nested alternatives; a cycle ends here
constexpr int kMaxSteps = 10'000;  // schemas looked at for one parameter: alternatives may multiply

// Resolves types against one root document.
class Resolver {
 public:
  explicit Resolver(const ordered_json& root) : root_(root) {}

  // Nothing if the schema does not say.
  std::optional<uint8_t> types(const ordered_json& schema, int depth = 0) {
    if (!schema.is_object() || depth > kMaxDepth || ++n_steps_ > kMaxSteps) return std::nullopt;
    if (const ordered_json* target = reference(schema)) return types(*target, depth + 1);
    std::optional<uint8_t> found;
    const auto narrow = [&](std::optional<uint8_t> more) {
      if (more) found = found ? static_cast<uint8_t>(*found & *more) : *more;
    };
    if (const auto at = schema.find("type"); at != schema.end()) narrow(named(*at));
    for (const char* name : {"anyOf", "oneOf"}) narrow(any_of(schema, name, depth));
    if (const auto at = schema.find("allOf"); at != schema.end() && at->is_array())
      for (const ordered_json& part : *at) narrow(types(part, depth + 1));
    if (found) return found;
    if (const auto at = schema.find("enum"); at != schema.end() && at->is_array() && !at->empty()) {
      uint8_t set = 0;
      for (const ordered_json& value : *at) set |= type_of(value);
      return set;
    }
    if (const auto at = schema.find("const"); at != schema.end()) return type_of(*at);
    if (schema.contains("properties")) return kObject;
    if (schema.contains("items")) return kArray;
    return std::nullopt;
  }

  // Adds the properties of an object schema, also through references and alternatives.
  void collect(const ordered_json& schema, ToolSet::Parameters& out, int depth = 0) {
    if (!schema.is_object() || depth > kMaxDepth || ++n_steps_ > kMaxSteps) return;
    if (const ordered_json* target = reference(schema)) collect(*target, out, depth + 1);
    if (const auto at = schema.find("properties"); at != schema.end() && at->is_object())
      for (const auto& [name, property] : at->items())
        out.emplace(name, Resolver(root_).types(property).value_or(kUntyped));
    for (const char* name : {"allOf", "anyOf", "oneOf"})
      if (const auto at = schema.find(name); at != schema.end() && at->is_array())
        for (const ordered_json& part : *at) collect(part, out, depth + 1);
  }

 private:
  const ordered_json* reference(const ordered_json& schema) const {
    const auto at = schema.find("$ref");
    if (at == schema.end() || !at->is_string()) return nullptr;
    return resolve_reference(root_, at->get_ref<const std::string&>());
  }

  std::optional<uint8_t> any_of(const ordered_json& schema, const char* name, int depth) {
    const auto at = schema.find(name);
    if (at == schema.end() || !at->is_array()) return std::nullopt;
    uint8_t set = 0;
    for (const ordered_json& part : *at) set |= types(part, depth + 1).value_or(kUntyped);
    return set == 0 ? std::nullopt : std::optional(set);
  }

  static std::optional<uint8_t> named(const ordered_json& type) {
    static const std::map<std::string, uint8_t, std::less<>> kNames = {
        {"integer", kInteger}, {"number", kNumber}, {"boolean", kBoolean}, {"null", kNull},
        {"object", kObject},   {"array", kArray},   {"string", kString}};
    uint8_t set = 0;
    const auto add = [&](const ordered_json& name) {
      if (!name.is_string()) return;
      if (const auto at = kNames.find(name.get_ref<const std::string&>()); at != kNames.end())
        set |= at->second;
    };
    if (type.is_array()) std::for_each(type.begin(), type.end(), add);
    else add(type);
    return set == 0 ? std::nullopt : std::optional(set);
  }

  static uint8_t type_of(const ordered_json& value) {
    switch (value.type()) {
      case ordered_json::value_t::null:
        return kNull;
      case ordered_json::value_t::boolean:
        return kBoolean;
      case ordered_json::value_t::object:
        return kObject;
      case ordered_json::value_t::array:
        return kArray;
      case ordered_json::value_t::string:
        return kString;
      case ordered_json::value_t::number_float:
        return kNumber;
      default:
        return kInteger;
    }
  }

  const ordered_json& root_;
  int n_steps_ = 0;
};

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Length of -?(0|[1-9][0-9]*) at the start, or 0.
size_t integer_length(std::string_view text) {
  size_t n = text.starts_with('-') ? 1 : 0;
  if (n >= text.size() || !is_digit(text[n])) return 0;
  if (text[n] == '0') return n + 1;
  while (n < text.size() && is_digit(text[n])) ++n;
  return n;
}

bool is_number(std::string_view text) {
  size_t n = integer_length(text);
  if (n == 0) return false;
  const auto digits = [&] {
    const size_t begin = n;
    while (n < text.size() && is_digit(text[n])) ++n;
    return n > begin;
  };
  if (n < text.size() && text[n] == '.') {
    ++n;
    if (!digits()) return false;
  }
  if (n < text.size() && (text[n] == 'e' || text[n] == 'E')) {
    ++n;
    if (n < text.size() && (text[n] == '+' || text[n] == '-')) ++n;
    if (!digits()) return false;
  }
  return n == text.size();
}

bool equals_ignoring_case(std::string_view text, std::string_view lower) {
  return std::equal(text.begin(), text.end(), lower.begin(), lower.end(),
                    [](char a, char b) { return ascii_lower(a) == b; });
}

// The value as JSON of one of the types; empty if it fits none. A number beyond a double fits none: some
// readers of JSON refuse it, ours when the call comes back in the history.
std::string typed(std::string_view text, uint8_t types) {
  const bool is_integer = (types & kInteger) && !text.empty() && integer_length(text) == text.size();
  if ((is_integer || ((types & kNumber) && is_number(text))) && parse_json(text)) return std::string(text);
  if (types & kBoolean)
    for (const std::string_view word : {"true", "false"})
      if (equals_ignoring_case(text, word)) return std::string(word);
  if ((types & kNull) && text == "null") return "null";
  if (((types & kObject) && text.starts_with('{')) || ((types & kArray) && text.starts_with('[')))
    if (parse_json(text, kMaxValueDepth)) return std::string(text);
  return {};
}

}  // namespace

ToolSet::ToolSet(const ordered_json& tools) {
  if (!tools.is_array()) return;
  for (const ordered_json& tool : tools) {
    if (!tool.is_object()) continue;
    const auto inner = tool.find("function");
    const ordered_json& function = inner != tool.end() && inner->is_object() ? *inner : tool;
    const auto name = function.find("name");
    if (name == function.end() || !name->is_string()) continue;
    Parameters parameters;
    if (const auto schema = function.find("parameters"); schema != function.end())
      Resolver(*schema).collect(*schema, parameters);
    functions_.emplace(name->get<std::string>(), std::move(parameters));
  }
}

const ToolSet::Parameters* ToolSet::find(std::string_view function) const {
  const auto at = functions_.find(function);
  return at == functions_.end() ? nullptr : &at->second;
}

uint8_t schema_types(const ordered_json& schema, const ordered_json& root) {
  return Resolver(root).types(schema).value_or(kUntyped);
}

void append_typed_value(std::string_view value, uint8_t types, std::string& out) {
  if (!is_plain_string(types)) {
    if (const std::string json = typed(trimmed(value), types); !json.empty()) {
      out += json;
      return;
    }
  }
  out += '"';
  escape_json_append(value, out);
  out += '"';
}

}  // namespace lily::text
