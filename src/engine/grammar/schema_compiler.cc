#include "engine/grammar/schema_compiler.h"

#include <algorithm>

#include "base/error.h"
#include "engine/grammar/regex.h"
#include "engine/grammar/schema_keywords.h"
#include "text/json_text.h"

namespace lily::engine::grammar {
namespace {

using Kind = Node::Kind;

constexpr int kMaxNesting = 200;

std::string below(const std::string& path, std::string_view key) {
  std::string out = path + "/";
  for (const char c : key) {
    if (c == '~') out += "~0";
    else if (c == '/') out += "~1";
    else out += c;
  }
  return out;
}

std::string below(const std::string& path, size_t index) { return below(path, std::to_string(index)); }

std::string json_quoted(std::string_view text) {
  std::string out = "\"";
  text::escape_json_append(text, out);
  return out + "\"";
}

}  // namespace

void check_nesting(const ordered_json& value, const std::string& name) {
  std::vector<std::pair<const ordered_json*, int>> todo{{&value, 0}};
  while (!todo.empty()) {
    const auto [at, depth] = todo.back();
    todo.pop_back();
    if (depth > kMaxNesting) fail(Fault::user, "{} is nested more than {} levels deep", name, kMaxNesting);
    if (at->is_structured())
      for (const ordered_json& child : *at) todo.emplace_back(&child, depth + 1);
  }
}

NodeId add_any_value(Grammar& g) {
  const NodeId any = g.add({.kind = Kind::any_of});
  const std::vector<std::string> names = {"null", "true", "false"};
  const NodeId word = g.add({.kind = Kind::bytes, .dfa = words(names)});
  const NodeId number = g.add({.kind = Kind::bytes, .dfa = numbers({})});
  const NodeId string = g.add({.kind = Kind::string});
  const NodeId array = g.add({.kind = Kind::array, .rest = any});
  const NodeId object = g.add({.kind = Kind::object, .rest = any, .rest_key = string});
  g[any].children = {word, number, string, array, object};
  return any;
}

SchemaCompiler::SchemaCompiler(Grammar& grammar, const ordered_json& root, std::string name,
                               const SchemaLimits& limits)
    : grammar_(grammar),
      root_(root),
      name_(std::move(name)),
      limits_(limits),
      pattern_steps_left_(limits.max_pattern_steps) {
  check_nesting(root, name_);
}

SchemaLimits SchemaCompiler::left() const {
  SchemaLimits out = limits_;
  out.max_places -= n_places_;
  out.max_dfa_states -= n_dfa_states_;
  out.max_work -= n_work_;
  out.max_pattern_steps = pattern_steps_left_;
  return out;
}

void SchemaCompiler::refuse(const std::string& path, const std::string& what) const {
  fail(Fault::user, "{} at {}: {}", name_, printable(path), what);
}

NodeId SchemaCompiler::keep(Node node, const std::string& path) {
  n_dfa_states_ += node.dfa.n_states();
  if (grammar_.nodes.size() >= static_cast<size_t>(limits_.max_nodes) ||
      n_dfa_states_ > limits_.max_dfa_states)
    refuse(path, "the schema is too large here; use fewer or shorter alternatives, words and lengths");
  return grammar_.add(std::move(node));
}

void SchemaCompiler::spend(int64_t work, const std::string& path) {
  n_work_ += work;
  if (n_work_ > limits_.max_work)
    refuse(path, "the schema is too large here; use fewer values, alternatives and long patterns");
}

NodeId SchemaCompiler::any_value() {
  if (any_value_ == kNoNode) any_value_ = add_any_value(grammar_);
  return any_value_;
}

NodeId SchemaCompiler::compile(const ordered_json& schema, const std::string& path) {
  return compile_all({{&schema, path, {}}}, Form::json);
}

NodeId SchemaCompiler::compile_parameter(const Property& property) {
  std::vector<Part> parts;
  for (const auto& [schema, path] : property.schemas) parts.push_back({schema, path, {}});
  return compile_all(std::move(parts), Form::parameter);
}

// The node of a place, made once for each set of schemas; a recursive schema meets its own node again.
NodeId SchemaCompiler::compile_all(std::vector<Part> parts, Form form) {
  if (parts.empty() && form == Form::json) return any_value();
  std::vector<const ordered_json*> key;
  for (const Part& part : parts) key.push_back(part.schema);
  std::sort(key.begin(), key.end());
  key.erase(std::unique(key.begin(), key.end()), key.end());
  const auto known = places_.find({key, form});
  if (known != places_.end()) return known->second;
  const std::string path = parts.empty() ? "#" : parts[0].path;
  if (depth_ > limits_.max_depth)
    refuse(path, fmt::format("places nested more than {} levels deep are not supported", limits_.max_depth));
  const NodeId id = keep({.kind = Kind::any_of}, path);
  places_[{key, form}] = id;
  ++depth_;
  Place place;
  place.todo = std::move(parts);
  std::vector<NodeId> alternatives;
  if (form == Form::parameter) may_be_string_ = may_be_other_ = false;
  expand(std::move(place), form, alternatives);
  --depth_;
  // The text of a call has no quotes: what reads as a number becomes one, wherever the schema allows numbers.
  if (form == Form::parameter && may_be_string_ && may_be_other_)
    refuse(path, "a parameter that is a string or else a value with limits of its own is not supported");
  grammar_[id].children = std::move(alternatives);
  return id;
}

void SchemaCompiler::expand(Place place, Form form, std::vector<NodeId>& out) {
  while (!place.todo.empty() && !place.impossible) {
    const Part part = std::move(place.todo.back());
    place.todo.pop_back();
    if (++n_places_ > limits_.max_places)
      refuse(part.path,
             fmt::format("more than {} combinations of schemas; use fewer alternatives side by side",
                         limits_.max_places));
    add_part(part, place);
  }
  if (place.impossible) return;
  if (place.choices.empty()) {
    // The order in which parts were found is the order of what they say.
    std::reverse(place.atoms.begin(), place.atoms.end());
    return compile_atoms(place.atoms, form, out);
  }
  const Choice choice = std::move(place.choices.back());
  place.choices.pop_back();
  for (size_t i = 0; i < choice.alternatives->size(); ++i) {
    Place with = place;
    with.todo.push_back({&(*choice.alternatives)[i], below(choice.path, i), choice.chain});
    expand(std::move(with), form, out);
  }
}

// Adds what a schema says of itself, and what it refers to.
void SchemaCompiler::add_part(const Part& part, Place& place) {
  const ordered_json& schema = *part.schema;
  if (schema.is_boolean()) {
    place.impossible |= !schema.get<bool>();
    return;
  }
  if (!schema.is_object()) refuse(part.path, "a schema must be an object, true or false");
  check_keywords(part);
  if (std::find(part.chain.begin(), part.chain.end(), &schema) != part.chain.end())
    refuse(part.path, "the schema refers to itself without reading anything in between");
  std::vector<const ordered_json*> chain = part.chain;
  chain.push_back(&schema);
  if (static_cast<int>(chain.size()) > limits_.max_depth) refuse(part.path, "too many references in a row");
  const bool is_known =
      std::any_of(place.atoms.begin(), place.atoms.end(), [&](const Part& p) { return p.schema == &schema; });
  if (is_known) return;
  if (const ordered_json* reference = member(schema, "$ref"))
    place.todo.push_back({&resolve(part, *reference), reference->get<std::string>(), chain});
  if (const ordered_json* all = member(schema, "allOf"))
    for (size_t i = all->size(); i-- > 0;)
      place.todo.push_back({&(*all)[i], below(part.path + "/allOf", i), chain});
  for (const char* key : {"anyOf", "oneOf"}) {
    const ordered_json* alternatives = member(schema, key);
    if (alternatives == nullptr) continue;
    const Choice choice{alternatives, part.path + "/" + key, chain};
    if (key == std::string_view("oneOf")) check_disjoint(choice);
    place.choices.push_back(choice);
  }
  place.atoms.insert(place.atoms.begin(), {&schema, part.path, chain});
}

uint32_t SchemaCompiler::types_of(const std::vector<Part>& atoms) const {
  uint32_t types = kAllTypes, hinted = 0;
  bool said = false;
  for (const Part& atom : atoms) {
    hinted |= hinted_types(*atom.schema);
    const std::optional<uint32_t> own = stated_types(*atom.schema);
    if (!own) continue;
    said = true;
    types &= *own;
  }
  return said || hinted == 0 ? types : hinted;
}

void SchemaCompiler::compile_atoms(const std::vector<Part>& atoms, Form form, std::vector<NodeId>& out) {
  if (atoms.empty() && form == Form::json) {
    out.push_back(any_value());
    return;
  }
  const std::string path = atoms.empty() ? "#" : atoms[0].path;
  const bool has_values = std::any_of(atoms.begin(), atoms.end(), [](const Part& p) {
    return p.schema->contains("enum") || p.schema->contains("const");
  });
  if (has_values) return compile_values(atoms, form, out);
  const uint32_t types = types_of(atoms);
  if (form == Form::parameter) {
    note_parameter(atoms, types);
    const StringRules rules = string_rules(atoms);
    const bool any_text = rules.texts.empty() && rules.min == 0 && rules.max < 0;
    // Every other value is such a text too.
    if ((types & kStringType) != 0 && any_text) return out.push_back(string_node(atoms, form));
  }
  if ((types & kObjectType) != 0) out.push_back(object_node(atoms));
  if ((types & kArrayType) != 0) out.push_back(array_node(atoms));
  if ((types & kStringType) != 0) out.push_back(string_node(atoms, form));
  if ((types & (kNumberType | kIntegerType)) != 0)
    out.push_back(number_node(atoms, (types & kNumberType) == 0));
  std::vector<std::string> names;
  if ((types & kBooleanType) != 0) names = {"true", "false"};
  if ((types & kNullType) != 0) names.emplace_back("null");
  if (!names.empty()) out.push_back(keep({.kind = Kind::bytes, .dfa = words(names)}, path));
}

// enum and const: those values that fit everything else.
void SchemaCompiler::compile_values(const std::vector<Part>& atoms, Form form, std::vector<NodeId>& out) {
  std::vector<const ordered_json*> values;
  std::string path;
  for (const Part& atom : atoms) {
    const ordered_json* one = member(*atom.schema, "const");
    const ordered_json* list = member(*atom.schema, "enum");
    if (one == nullptr && list == nullptr) continue;
    path = atom.path;
    if (one != nullptr) values.push_back(one);
    else
      for (const ordered_json& value : *list) values.push_back(&value);
    break;
  }
  std::vector<std::string> texts;
  spend(static_cast<int64_t>(values.size()), path);
  for (const ordered_json* value : values) {
    const bool good =
        std::all_of(atoms.begin(), atoms.end(), [&](const Part& atom) { return fits_own(*value, atom, 0); });
    if (!good) continue;
    if (form == Form::parameter) (value->is_string() ? may_be_string_ : may_be_other_) |= !value->is_null();
    if (value->is_structured()) {
      out.push_back(value_node(*value, path));
      continue;
    }
    const bool is_bare = form == Form::parameter && value->is_string();
    texts.push_back(is_bare ? value->get<std::string>() : text::dump_json(*value));
    if (is_bare && (texts.back().find("</parameter>") != std::string::npos ||
                    texts.back().find("<parameter=") != std::string::npos))
      refuse(path, "a value that holds tags of the call syntax is not supported");
  }
  if (texts.empty()) return;
  try {
    out.push_back(keep({.kind = Kind::bytes, .dfa = words(texts)}, path));
  } catch (const Error& e) {
    refuse(path, fmt::format("enum: {}", e.what()));
  }
}

// Exactly this value, members in its order.
NodeId SchemaCompiler::value_node(const ordered_json& value, const std::string& path) {
  if (!value.is_structured()) return keep({.kind = Kind::literal, .literal = text::dump_json(value)}, path);
  Node node{.kind = value.is_array() ? Kind::array : Kind::object};
  if (value.is_array()) {
    node.min = node.max = static_cast<int64_t>(value.size());
    for (const ordered_json& item : value) node.children.push_back(value_node(item, path));
  } else {
    for (const auto& [key, member] : value.items()) {
      const NodeId name = keep({.kind = Kind::literal, .literal = json_quoted(key)}, path);
      node.members.push_back({name, value_node(member, path), true});
    }
  }
  return keep(std::move(node), path);
}

NodeId SchemaCompiler::number_node(const std::vector<Part>& atoms, bool integer) {
  NumberBounds bounds = number_bounds(atoms);
  bounds.integer = integer;
  spend(bounds.multiple_of.empty() ? 100 : 20'000, atoms.empty() ? "#" : atoms[0].path);
  try {
    return keep({.kind = Kind::bytes, .dfa = numbers(bounds)}, atoms[0].path);
  } catch (const Error& e) {
    refuse(atoms[0].path, e.what());
  }
}

SchemaCompiler::StringRules SchemaCompiler::string_rules(const std::vector<Part>& atoms) {
  StringRules rules;
  for (const Part& atom : atoms) {
    rules.min = std::max(rules.min, size_keyword(*atom.schema, "minLength", 0));
    const int64_t max = size_keyword(*atom.schema, "maxLength", -1);
    if (max >= 0) rules.max = rules.max < 0 ? max : std::min(rules.max, max);
    for (const char* key : {"pattern", "format"}) {
      const ordered_json* value = member(*atom.schema, key);
      if (value == nullptr) continue;
      const auto& text = value->get_ref<const std::string&>();
      const std::string name = std::string(key) + " " + text;
      auto known = texts_.find(name);
      if (known == texts_.end()) {
        try {
          std::optional<Dfa> dfa = key == std::string_view("format") ? format_texts(text, pattern_steps_left_)
                                                                     : regex(text, pattern_steps_left_);
          if (!dfa)
            refuse(atom.path + "/format",
                   fmt::format(
                       "format \"{}\" is not supported; date, time, date-time, duration, email, hostname, "
                       "ipv4, uri and uuid are",
                       printable(text)));
          n_dfa_states_ += dfa->n_states();
          known = texts_.emplace(name, std::move(*dfa)).first;
        } catch (const Error& e) {
          if (std::string_view(e.what()).starts_with(name_)) throw;
          refuse(below(atom.path, key), e.what());
        }
      }
      rules.texts.push_back(known->second);
    }
  }
  return rules;
}

NodeId SchemaCompiler::string_node(const std::vector<Part>& atoms, Form form) {
  const StringRules rules = string_rules(atoms);
  const std::string path = atoms.empty() ? "#" : atoms[0].path;
  if (rules.max >= 0 && rules.min > rules.max) return keep({}, path);
  if (rules.texts.empty() && form == Form::json)
    return keep({.kind = Kind::string, .min = rules.min, .max = rules.max}, path);
  try {
    std::vector<Dfa> all = rules.texts;
    if (rules.min > 0 || rules.max >= 0) all.push_back(characters(rules.min, rules.max));
    if (form == Form::parameter) {
      const std::vector<std::string> tags = {"</parameter>", "<parameter="};
      all.push_back(texts_without(tags));
    }
    Dfa dfa = all[0];
    for (size_t i = 1; i < all.size(); ++i) {
      const int64_t product = int64_t{dfa.n_states()} * all[i].n_states();
      spend(all[i].n_states() + std::min<int64_t>(product, kMaxDfaStates), path);
      dfa = intersection(dfa, all[i]);
    }
    return keep({.kind = form == Form::json ? Kind::text : Kind::bytes, .dfa = std::move(dfa)}, path);
  } catch (const Error& e) {
    if (std::string_view(e.what()).starts_with(name_)) throw;
    refuse(path, fmt::format("pattern and length together: {}", e.what()));
  }
}

NodeId SchemaCompiler::array_node(const std::vector<Part>& atoms) {
  Node node{.kind = Kind::array};
  size_t n_first = 0;
  for (const Part& atom : atoms) {
    node.min = std::max(node.min, size_keyword(*atom.schema, "minItems", 0));
    const int64_t max = size_keyword(*atom.schema, "maxItems", -1);
    if (max >= 0) node.max = node.max < 0 ? max : std::min(node.max, max);
    if (const ordered_json* first = member(*atom.schema, "prefixItems"))
      n_first = std::max(n_first, first->size());
  }
  const std::string path = atoms.empty() ? "#" : atoms[0].path;
  const auto item = [&](size_t i) {
    std::vector<Part> parts;
    for (const Part& atom : atoms) {
      const ordered_json* first = member(*atom.schema, "prefixItems");
      if (first != nullptr && i < first->size())
        parts.push_back({&(*first)[i], below(atom.path + "/prefixItems", i), {}});
      else if (const ordered_json* rest = member(*atom.schema, "items"))
        parts.push_back({rest, atom.path + "/items", {}});
    }
    return compile_all(std::move(parts), Form::json);
  };
  const NodeId id = keep({}, path);
  for (size_t i = 0; i < n_first; ++i) node.children.push_back(item(i));
  node.rest = item(n_first);
  grammar_[id] = std::move(node);
  return id;
}

// Declared members in the order of the schemas, then those that are only required. `others`: what holds for
// the rest, if they may come at all.
SchemaCompiler::Object SchemaCompiler::members_of(const std::vector<Part>& atoms, std::vector<Part>& others) {
  Object out;
  std::map<std::string, size_t, std::less<>> index;
  const auto property = [&](const std::string& name) -> Property& {
    const auto [at, is_new] = index.emplace(name, out.properties.size());
    if (is_new) out.properties.push_back({.name = name});
    return out.properties[at->second];
  };
  bool says_others = false;
  for (const Part& atom : atoms) {
    if (const ordered_json* properties = member(*atom.schema, "properties"))
      for (const auto& [name, schema] : properties->items()) property(name);
    if (const ordered_json* rest = member(*atom.schema, "additionalProperties")) {
      says_others = true;
      others.push_back({rest, atom.path + "/additionalProperties", {}});
    }
  }
  for (const Part& atom : atoms)
    if (const ordered_json* required = member(*atom.schema, "required"))
      for (const ordered_json& name : *required) property(name.get<std::string>()).required = true;
  for (Property& p : out.properties)
    for (const Part& atom : atoms) {
      const ordered_json* properties = member(*atom.schema, "properties");
      const ordered_json* own = properties == nullptr ? nullptr : member(*properties, p.name.c_str());
      if (own != nullptr) p.schemas.emplace_back(own, below(atom.path + "/properties", p.name));
      else if (const ordered_json* rest = member(*atom.schema, "additionalProperties"))
        p.schemas.emplace_back(rest, atom.path + "/additionalProperties");
    }
  // Silence about other members means none where some are declared: a model would fill the silence.
  out.open = says_others ? std::none_of(
                               others.begin(), others.end(),
                               [](const Part& p) { return p.schema->is_boolean() && !p.schema->get<bool>(); })
                         : out.properties.empty();
  return out;
}

NodeId SchemaCompiler::object_node(const std::vector<Part>& atoms) {
  std::vector<Part> others;
  const Object object = members_of(atoms, others);
  const std::string path = atoms.empty() ? "#" : atoms[0].path;
  if (object.properties.size() > 1000)
    refuse(path,
           fmt::format("{} properties of one object; at most 1000 are supported", object.properties.size()));
  Node node{.kind = Kind::object};
  for (const Part& atom : atoms) {
    node.min = std::max(node.min, size_keyword(*atom.schema, "minProperties", 0));
    const int64_t max = size_keyword(*atom.schema, "maxProperties", -1);
    if (max >= 0) node.max = node.max < 0 ? max : std::min(node.max, max);
  }
  const NodeId id = keep({}, path);
  std::vector<std::string> names;
  spend(static_cast<int64_t>(object.properties.size()), path);
  for (const Property& p : object.properties) {
    std::vector<Part> parts;
    for (const auto& [schema, where] : p.schemas) parts.push_back({schema, where, {}});
    Node key{.kind = Kind::literal, .literal = json_quoted(p.name)};
    node.members.push_back(
        {keep(std::move(key), path), compile_all(std::move(parts), Form::json), p.required});
    names.push_back(p.name);
  }
  if (object.open) {
    node.rest = compile_all(std::move(others), Form::json);
    if (names.empty()) {
      node.rest_key = keep({.kind = Kind::string}, path);
    } else {
      try {
        node.rest_key = keep({.kind = Kind::text, .dfa = all_but(names)}, path);
        spend(grammar_[node.rest_key].dfa.n_states(), path);
      } catch (const Error& e) {
        refuse(path, e.what());
      }
    }
  }
  grammar_[id] = std::move(node);
  return id;
}

SchemaCompiler::Object SchemaCompiler::object(const ordered_json& schema, const std::string& path) {
  Place place;
  place.todo.push_back({&schema, path, {}});
  while (!place.todo.empty()) {
    const Part part = std::move(place.todo.back());
    place.todo.pop_back();
    add_part(part, place);
  }
  if (place.impossible || !place.choices.empty())
    refuse(path, "parameters must be described by one object schema, without anyOf, oneOf and false");
  std::reverse(place.atoms.begin(), place.atoms.end());
  std::vector<Part> others;
  return members_of(place.atoms, others);
}

Grammar schema_grammar(const ordered_json& schema, const std::string& name, const SchemaLimits& limits) {
  Grammar grammar;
  grammar.root = SchemaCompiler(grammar, schema, name, limits).compile_root();
  if (!grammar.prune()) fail(Fault::user, "{} at #: no JSON value fits this schema", name);
  return grammar;
}

Grammar json_object_grammar() {
  Grammar grammar;
  const NodeId any = add_any_value(grammar);
  const NodeId key = grammar.add({.kind = Kind::string});
  grammar.root = grammar.add({.kind = Kind::object, .rest = any, .rest_key = key});
  grammar.prune();
  return grammar;
}

}  // namespace lily::engine::grammar
