#include "engine/grammar/call_grammar.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>

#include "base/error.h"
#include "engine/grammar/regex.h"
#include "engine/grammar/schema_compiler.h"
#include "engine/grammar/schema_keywords.h"
#include "text/tool_schema.h"

namespace lily::engine::grammar {
namespace {

using Kind = Node::Kind;

constexpr size_t kMaxFunctions = 1000;

const ordered_json& function_of(const ordered_json& tool) {
  const auto inner = tool.find("function");
  return inner != tool.end() && inner->is_object() ? *inner : tool;
}

bool is_strict(const ordered_json& function) {
  const auto at = function.find("strict");
  return at != function.end() && at->is_boolean() && at->get<bool>();
}

// Can stand in <function=NAME> and <parameter=NAME>.
bool is_writable(std::string_view name) {
  return !name.empty() && name.size() <= 256 && name.find_first_of("<>\n\r") == std::string_view::npos;
}

class CallGrammar {
 public:
  CallGrammar(const ordered_json& tools, const SchemaLimits& limits) : left_(limits), declared_(tools) {
    const std::array<std::string, 2> tags = {"</parameter>", "<parameter="};
    free_text_ = grammar_.add({.kind = Kind::bytes, .dfa = texts_without(tags)});
    close_parameter_ = grammar_.add_literal("\n</parameter>\n");
    close_function_ = grammar_.add_literal("</function>");
    const std::array<std::string, 2> end = {"", "\n"};
    end_ = grammar_.add({.kind = Kind::bytes, .dfa = words(end)});
    root_ = grammar_.add({.kind = Kind::any_of});
  }

  void add(const ordered_json& function, const ToolPlace& place) {
    const std::string name = function.at("name").get<std::string>();
    if (!is_writable(name))
      fail(Fault::user, "{}: \"{}\" cannot be written in a call; use letters, digits, _ and -", place.name,
           printable(name));
    const NodeId members = grammar_.add({.kind = Kind::members});
    Node filled = is_strict(function) ? strict_members(function, place.schema) : free_members(function, name);
    grammar_[members] = std::move(filled);
    const NodeId head = grammar_.add_literal("\n<function=" + name + ">\n");
    const NodeId call =
        grammar_.add({.kind = Kind::sequence, .children = {head, members, close_function_, end_}});
    grammar_[root_].children.push_back(call);
    if (grammar_[root_].children.size() > kMaxFunctions)
      fail(Fault::user, "tools: more than {} functions", kMaxFunctions);
  }

  Grammar take() {
    grammar_.root = root_;
    if (!grammar_.prune()) fail(Fault::user, "tools: no call fits the strict schemas of the functions");
    return std::move(grammar_);
  }

 private:
  NodeId parameter(const std::string& name, NodeId value) {
    const NodeId open = grammar_.add_literal("<parameter=" + name + ">\n");
    return grammar_.add({.kind = Kind::sequence, .children = {open, value, close_parameter_}});
  }

  Node strict_members(const ordered_json& function, const std::string& place) {
    Node members{.kind = Kind::members};
    const auto schema = function.find("parameters");
    if (schema == function.end() || schema->is_null()) return members;
    SchemaCompiler compiler(grammar_, *schema, place, left_);
    for (const auto& property : compiler.object(*schema, "#").properties) {
      if (!is_writable(property.name))
        fail(Fault::user, "{} at #/properties: \"{}\" cannot be written in a call", place,
             printable(property.name));
      const NodeId value = compiler.compile_parameter(property);
      members.members.push_back({.value = parameter(property.name, value), .required = property.required});
    }
    left_ = compiler.left();
    return members;
  }

  Node free_members(const ordered_json& function, const std::string& name) {
    Node members{.kind = Kind::members};
    const text::ToolSet::Parameters* parameters = declared_.find(name);
    std::set<std::string> required;
    const auto schema = function.find("parameters");
    if (schema != function.end() && schema->is_object() && schema->contains("required") &&
        schema->at("required").is_array())
      for (const ordered_json& r : schema->at("required"))
        if (r.is_string()) required.insert(r.get<std::string>());
    if (parameters != nullptr)
      for (const auto& [key, types] : *parameters)
        if (is_writable(key))
          members.members.push_back(
              {.value = parameter(key, free_text_), .required = required.contains(key)});
    if (!members.members.empty()) return members;
    // Nothing is declared: whatever the model finds right.
    const NodeId open = grammar_.add_literal("<parameter=");
    const NodeId key = grammar_.add({.kind = Kind::bytes, .dfa = regex("^[A-Za-z0-9_.-]{1,64}$")});
    const NodeId end = grammar_.add_literal(">\n");
    members.rest =
        grammar_.add({.kind = Kind::sequence, .children = {open, key, end, free_text_, close_parameter_}});
    return members;
  }

  Grammar grammar_;
  SchemaLimits left_;  // for the functions to come
  const text::ToolSet declared_;
  NodeId free_text_, close_parameter_, close_function_, end_, root_;
};

}  // namespace

Grammar call_grammar(const ordered_json& tools, std::string_view name, std::span<const ToolPlace> places,
                     const SchemaLimits& limits) {
  CallGrammar grammar(tools, limits);
  bool found = false;
  for (size_t i = 0; tools.is_array() && i < tools.size(); ++i) {
    const ordered_json& function = function_of(tools[i]);
    const auto own = function.find("name");
    if (own == function.end() || !own->is_string()) continue;
    if (!name.empty() && own->get_ref<const std::string&>() != name) continue;
    const std::string at = fmt::format("tools[{}].function", i);
    grammar.add(function, i < places.size() ? places[i] : ToolPlace{at + ".name", at + ".parameters"});
    found = true;
  }
  if (!found && !name.empty())
    fail(Fault::user, "tool_choice names \"{}\", which is not among the tools", printable(name));
  if (!found) fail(Fault::user, "tool_choice asks for a call, but there are no tools");
  return grammar.take();
}

bool any_strict(const ordered_json& tools) {
  return tools.is_array() && std::any_of(tools.begin(), tools.end(), [](const ordered_json& tool) {
           return tool.is_object() && is_strict(function_of(tool));
         });
}

}  // namespace lily::engine::grammar
