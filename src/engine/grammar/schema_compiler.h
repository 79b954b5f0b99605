// JSON Schema as a grammar. docs/structured-output.md has the keywords, and where the grammar writes less
// than the schema allows; what it writes is always valid.
//
// A place of the document is described by a set of schemas that all hold there ($ref and allOf add to it,
// anyOf and oneOf divide it into alternatives), so keywords side by side and in several schemas are joined
// exactly.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/grammar/grammar.h"
#include "engine/grammar/number.h"
#include "engine/grammar/regex.h"

namespace lily::engine::grammar {

using nlohmann::ordered_json;

struct SchemaLimits {
  int max_depth = 100;                        // places inside one another, references in a row
  int max_places = 10'000;                    // sets of schemas that are looked at
  int max_nodes = 100'000;                    // of the grammar
  int max_dfa_states = 60'000;                // of all automata together
  int64_t max_work = 1'000'000;               // comparisons of values, steps of automata: seconds at the most
  int64_t max_pattern_steps = kPatternSteps;  // of all patterns and formats together
};

// Throws Error(Fault::user) for JSON whose nesting would overflow the stack of whoever walks it.
void check_nesting(const ordered_json& value, const std::string& name);

// Any JSON value; added once to a grammar.
NodeId add_any_value(Grammar& grammar);

// Compiles schemas of one document into a grammar. Everything throws Error(Fault::user) for what is not
// supported or fits no value; the message has the JSON pointer of the place, as "#/properties/a".
class SchemaCompiler {
 public:
  // `root` must outlive this. `name` is what messages call the document.
  SchemaCompiler(Grammar& grammar, const ordered_json& root, std::string name,
                 const SchemaLimits& limits = {});

  // What these limits leave to the next schema of the same request.
  SchemaLimits left() const;

  NodeId compile_root() { return compile(root_, "#"); }
  NodeId compile(const ordered_json& schema, const std::string& path);

  // A schema of this document as tools' parameters need it: its members, not its JSON.
  struct Property {
    std::string name;
    std::vector<std::pair<const ordered_json*, std::string>> schemas;  // all hold; with their paths
    bool required = false;
  };
  struct Object {
    std::vector<Property> properties;
    bool open = true;  // other members may come
  };
  // Refuses schemas that are no plain object schema.
  Object object(const ordered_json& schema, const std::string& path);
  // The text of a value between the tags of a call: strings as they are, without what would end them;
  // everything else JSON.
  NodeId compile_parameter(const Property& property);

 private:
  // A schema that holds, and the references that led to it.
  struct Part {
    const ordered_json* schema = nullptr;
    std::string path;
    std::vector<const ordered_json*> chain;
  };
  struct Choice {
    const ordered_json* alternatives = nullptr;
    std::string path;
    std::vector<const ordered_json*> chain;
  };
  struct Place {
    std::vector<Part> atoms;  // their own keywords count, references and combinations have been followed
    std::vector<Choice> choices;
    std::vector<Part> todo;
    bool impossible = false;
  };
  enum class Form : uint8_t { json, parameter };

  NodeId compile_all(std::vector<Part> parts, Form form);
  void expand(Place place, Form form, std::vector<NodeId>& out);
  void add_part(const Part& part, Place& place);
  void compile_atoms(const std::vector<Part>& atoms, Form form, std::vector<NodeId>& out);
  void compile_values(const std::vector<Part>& atoms, Form form, std::vector<NodeId>& out);
  NodeId value_node(const ordered_json& value, const std::string& path);
  NodeId number_node(const std::vector<Part>& atoms, bool integer);
  NodeId string_node(const std::vector<Part>& atoms, Form form);
  NodeId array_node(const std::vector<Part>& atoms);
  NodeId object_node(const std::vector<Part>& atoms);
  Object members_of(const std::vector<Part>& atoms, std::vector<Part>& others);
  void check_disjoint(const Choice& choice);
  uint32_t types_of(const std::vector<Part>& atoms) const;
  void note_parameter(const std::vector<Part>& atoms, uint32_t types);

  void check_keywords(const Part& part);
  const ordered_json& resolve(const Part& part, const ordered_json& reference) const;
  NodeId keep(Node node, const std::string& path);
  NodeId any_value();
  // Counts work that is no place, so that it ends.
  void spend(int64_t work, const std::string& path);
  [[noreturn]] void refuse(const std::string& path, const std::string& what) const;

  // Of one schema object.
  struct StringRules {
    int64_t min = 0, max = -1;
    std::vector<Dfa> texts;
  };
  StringRules string_rules(const std::vector<Part>& atoms);
  NumberBounds number_bounds(const std::vector<Part>& atoms) const;

  // Whether a value of enum or const fits a schema.
  bool fits(const ordered_json& value, const Part& part, int depth);
  bool fits_own(const ordered_json& value, const Part& part, int depth);

  Grammar& grammar_;
  const ordered_json& root_;
  const std::string name_;
  const SchemaLimits limits_;
  std::map<std::pair<std::vector<const ordered_json*>, Form>, NodeId> places_;
  std::map<std::string, Dfa, std::less<>> texts_;  // by pattern or "format name"
  std::set<const ordered_json*> checked_;
  NodeId any_value_ = kNoNode;
  // Of the parameter at work: it may be a string, and something else that not every such value fits.
  bool may_be_string_ = false, may_be_other_ = false;
  std::set<const ordered_json*> disjoint_;
  int n_places_ = 0, n_dfa_states_ = 0, depth_ = 0;
  int64_t n_work_ = 0, pattern_steps_left_;
};

// A grammar of the documents of a schema, or of any JSON object; pruned.
Grammar schema_grammar(const ordered_json& schema, const std::string& name, const SchemaLimits& limits = {});
Grammar json_object_grammar();

}  // namespace lily::engine::grammar
