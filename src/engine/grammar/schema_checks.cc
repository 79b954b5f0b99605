// The parts of SchemaCompiler that look at schemas and values without making nodes.
#include <algorithm>

#include "base/error.h"
#include "engine/grammar/regex.h"
#include "engine/grammar/schema_compiler.h"
#include "engine/grammar/schema_keywords.h"
#include "text/json_reference.h"
#include "text/json_text.h"

namespace lily::engine::grammar {
namespace {

constexpr int kMaxValueDepth = 64;

int64_t n_characters(const std::string& text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (static_cast<uint8_t>(c) & 0xc0) != 0x80; });
}

bool equal(const ordered_json& a, const ordered_json& b) {
  if (a.is_object() && b.is_object()) {
    if (a.size() != b.size()) return false;
    for (const auto& [key, value] : a.items()) {
      const auto at = b.find(key);
      if (at == b.end() || !equal(value, *at)) return false;
    }
    return true;
  }
  if (a.is_array() && b.is_array())
    return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), equal);
  return a == b;
}

}  // namespace

void SchemaCompiler::check_keywords(const Part& part) {
  if (checked_.contains(part.schema)) return;
  if (const auto bad = bad_keyword(*part.schema))
    refuse(part.path + "/" + printable(bad->keyword), bad->reason);
  if (part.schema != &root_ && part.schema->contains("$id"))
    refuse(part.path + "/$id", "only the whole schema may have an $id");
  checked_.insert(part.schema);
}

const ordered_json& SchemaCompiler::resolve(const Part& part, const ordered_json& reference) const {
  const std::string& text = reference.get_ref<const std::string&>();
  const std::string path = part.path + "/$ref";
  if (!text::is_local_reference(text))
    refuse(path,
           fmt::format("\"{}\" is not supported: references must point into the same schema, as #/$defs/name",
                       printable(text)));
  const ordered_json* target = text::resolve_reference(root_, text);
  if (target == nullptr) refuse(path, fmt::format("\"{}\" does not exist", printable(text)));
  return *target;
}

NumberBounds SchemaCompiler::number_bounds(const std::vector<Part>& atoms) const {
  NumberBounds bounds;
  for (const Part& atom : atoms) {
    const auto decimal = [&](const char* key) -> std::optional<Decimal> {
      const ordered_json* value = member(*atom.schema, key);
      if (value == nullptr) return std::nullopt;
      const auto parsed = Decimal::parse(value->dump());
      if (!parsed) refuse(atom.path + "/" + key, "the number is too large or too small");
      return parsed;
    };
    if (const auto value = decimal("minimum")) bounds.low.push_back({*value, false});
    if (const auto value = decimal("exclusiveMinimum")) bounds.low.push_back({*value, true});
    if (const auto value = decimal("maximum")) bounds.high.push_back({*value, false});
    if (const auto value = decimal("exclusiveMaximum")) bounds.high.push_back({*value, true});
    if (const auto value = decimal("multipleOf")) bounds.multiple_of.push_back(*value);
  }
  return bounds;
}

// A parameter that may be a string is not written in quotes, so that other values must be free of limits.
void SchemaCompiler::note_parameter(const std::vector<Part>& atoms, uint32_t types) {
  may_be_string_ |= (types & kStringType) != 0;
  for (const Part& atom : atoms) {
    const uint32_t limited = hinted_types(*atom.schema) & types & ~uint32_t{kStringType};
    may_be_other_ |= limited != 0;
  }
}

// oneOf is anyOf if no value fits two of its alternatives: their types differ, or a required property has
// other values.
void SchemaCompiler::check_disjoint(const Choice& choice) {
  if (!disjoint_.insert(choice.alternatives).second) return;
  struct Seen {
    uint32_t types = kAllTypes;
    bool has_values = false;
    std::vector<ordered_json> values;
    std::map<std::string, std::vector<ordered_json>> properties;  // required ones with listed values
  };
  const auto values_of = [](const ordered_json& schema) -> std::optional<std::vector<ordered_json>> {
    if (const ordered_json* one = member(schema, "const")) return std::vector{*one};
    const ordered_json* list = member(schema, "enum");
    if (list == nullptr || !list->is_array()) return std::nullopt;
    return std::vector<ordered_json>(list->begin(), list->end());
  };
  std::vector<Seen> all;
  for (size_t i = 0; i < choice.alternatives->size(); ++i) {
    Part part{&(*choice.alternatives)[i], choice.path + "/" + std::to_string(i), {}};
    for (int hops = 0; part.schema->is_object() && part.schema->contains("$ref") && hops < 32; ++hops) {
      check_keywords(part);
      part.schema = &resolve(part, part.schema->at("$ref"));
    }
    Seen seen;
    if (part.schema->is_object()) {
      check_keywords(part);
      const ordered_json& schema = *part.schema;
      seen.types = stated_types(schema).value_or(kAllTypes);
      if (auto values = values_of(schema)) {
        seen.has_values = true;
        seen.values = std::move(*values);
        uint32_t listed = 0;
        for (const ordered_json& value : seen.values) listed |= type_of(value);
        seen.types &= (listed & kIntegerType) != 0 ? listed | kNumberType : listed;
      }
      const ordered_json* required = member(schema, "required");
      const ordered_json* properties = member(schema, "properties");
      const bool object_only = seen.types == kObjectType || (!stated_types(schema) && properties != nullptr);
      if (required != nullptr && properties != nullptr && object_only)
        for (const ordered_json& name : *required) {
          const ordered_json* property = member(*properties, name.get_ref<const std::string&>().c_str());
          if (property == nullptr || !property->is_object()) continue;
          if (auto values = values_of(*property))
            seen.properties[name.get<std::string>()] = std::move(*values);
        }
    }
    all.push_back(std::move(seen));
    if (all.size() > 200) refuse(choice.path, "more than 200 alternatives are not supported; use anyOf");
  }
  const auto apart = [&](const std::vector<ordered_json>& a, const std::vector<ordered_json>& b) {
    spend(static_cast<int64_t>(a.size() * b.size()), choice.path);
    return std::none_of(a.begin(), a.end(), [&](const ordered_json& x) {
      return std::any_of(b.begin(), b.end(), [&](const ordered_json& y) { return equal(x, y); });
    });
  };
  for (size_t i = 0; i < all.size(); ++i)
    for (size_t j = 0; j < i; ++j) {
      const auto common = all[i].types & all[j].types;
      bool good =
          common == 0 || (all[i].has_values && all[j].has_values && apart(all[i].values, all[j].values));
      for (const auto& [name, values] : all[i].properties) {
        const auto other = all[j].properties.find(name);
        good |= other != all[j].properties.end() && apart(values, other->second);
      }
      if (!good)
        refuse(choice.path,
               fmt::format("a value may fit both alternative {} and {}, which cannot be excluded here; use "
                           "anyOf, or a required property with a different const in each",
                           j, i));
    }
}

bool SchemaCompiler::fits(const ordered_json& value, const Part& part, int depth) {
  if (part.schema->is_boolean()) return part.schema->get<bool>();
  if (!part.schema->is_object()) refuse(part.path, "a schema must be an object, true or false");
  if (depth > kMaxValueDepth || ++n_places_ > limits_.max_places)
    refuse(part.path, "the values of enum and const cannot be checked against a schema this deep or large");
  check_keywords(part);
  const ordered_json& schema = *part.schema;
  if (const ordered_json* reference = member(schema, "$ref"))
    if (!fits(value, {&resolve(part, *reference), reference->get<std::string>(), {}}, depth + 1))
      return false;
  const auto n_fitting = [&](const char* key) {
    size_t n = 0;
    for (size_t i = 0; i < schema.at(key).size(); ++i)
      n += fits(value, {&schema.at(key)[i], part.path + "/" + key + "/" + std::to_string(i), {}}, depth + 1)
               ? 1
               : 0;
    return n;
  };
  if (schema.contains("allOf") && n_fitting("allOf") != schema.at("allOf").size()) return false;
  if (schema.contains("anyOf") && n_fitting("anyOf") == 0) return false;
  if (schema.contains("oneOf") && n_fitting("oneOf") != 1) return false;
  return fits_own(value, part, depth);
}

bool SchemaCompiler::fits_own(const ordered_json& value, const Part& part, int depth) {
  const ordered_json& schema = *part.schema;
  const uint32_t type = type_of(value);
  const auto inner = [&](const ordered_json& v, const ordered_json& s, const std::string& below) {
    return fits(v, {&s, part.path + "/" + below, {}}, depth + 1);
  };
  if (const auto types = stated_types(schema); types && (*types & type) == 0) return false;
  if (const ordered_json* one = member(schema, "const"); one != nullptr && !equal(value, *one)) return false;
  if (const ordered_json* list = member(schema, "enum")) {
    spend(static_cast<int64_t>(list->size()), part.path);
    if (std::none_of(list->begin(), list->end(), [&](const ordered_json& v) { return equal(value, v); }))
      return false;
  }
  const auto within = [&](int64_t n, const char* min, const char* max) {
    const int64_t most = size_keyword(schema, max, -1);
    return n >= size_keyword(schema, min, 0) && (most < 0 || n <= most);
  };
  if (value.is_string()) {
    const StringRules rules = string_rules({part});
    const auto& text = value.get_ref<const std::string&>();
    return within(n_characters(text), "minLength", "maxLength") &&
           std::all_of(rules.texts.begin(), rules.texts.end(),
                       [&](const Dfa& dfa) { return dfa.matches(text); });
  }
  if (value.is_number()) {
    const NumberBounds bounds = number_bounds({part});
    const auto decimal = Decimal::parse(value.dump());
    return bounds.free() || (decimal && bounds.contains(*decimal));
  }
  if (value.is_array()) {
    if (!within(static_cast<int64_t>(value.size()), "minItems", "maxItems")) return false;
    const ordered_json* first = member(schema, "prefixItems");
    const ordered_json* rest = member(schema, "items");
    for (size_t i = 0; i < value.size(); ++i) {
      const bool is_first = first != nullptr && i < first->size();
      if (is_first && !inner(value[i], (*first)[i], "prefixItems")) return false;
      if (!is_first && rest != nullptr && !inner(value[i], *rest, "items")) return false;
    }
  }
  if (value.is_object()) {
    if (!within(static_cast<int64_t>(value.size()), "minProperties", "maxProperties")) return false;
    if (const ordered_json* required = member(schema, "required"))
      for (const ordered_json& name : *required)
        if (!value.contains(name.get_ref<const std::string&>())) return false;
    const ordered_json* properties = member(schema, "properties");
    const ordered_json* rest = member(schema, "additionalProperties");
    for (const auto& [name, v] : value.items()) {
      const ordered_json* own = properties == nullptr ? nullptr : member(*properties, name.c_str());
      if (own != nullptr && !inner(v, *own, "properties")) return false;
      if (own == nullptr && rest != nullptr && !inner(v, *rest, "additionalProperties")) return false;
    }
  }
  return true;
}

}  // namespace lily::engine::grammar
