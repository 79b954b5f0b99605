// What a constrained text may look like, as data: a graph of nodes that call each other. schema_compiler.h
// makes it of a JSON schema, call_grammar.h of a request's tools, and matcher.h follows it byte by byte.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/grammar/dfa.h"

namespace lily::engine::grammar {

using NodeId = uint32_t;
inline constexpr NodeId kNoNode = ~NodeId{0};

// White space between the parts of a JSON document: at most this many bytes in one place, at most one line
// end among them, so that a model cannot go on with blanks for ever.
inline constexpr uint32_t kMaxBlanks = 80;

struct Node {
  enum class Kind : uint8_t {
    never,    // nothing fits
    literal,  // these bytes
    bytes,    // what the automaton accepts, as it is
    text,     // a JSON string of what the automaton accepts, escaped only where it must be
    string,   // any JSON string of min to max characters
    array,
    object,
    any_of,    // one of the children
    sequence,  // the children, one after the other
    members,   // each child at most once, in any order; those that are required at least once
  };
  struct Member {
    NodeId key = kNoNode;  // of an object: the quoted name, as a literal
    NodeId value = kNoNode;
    bool required = false;
  };

  Kind kind = Kind::never;
  std::string literal;
  Dfa dfa;
  int64_t min = 0,
          max = -1;  // characters of a string, items of an array, members of an object; max -1: no bound
  std::vector<NodeId> children;  // any_of, sequence; the first items of an array
  NodeId rest = kNoNode;         // array: the other items; object: the values of undeclared members
  NodeId rest_key = kNoNode;     // object: their names
  std::vector<Member> members;   // object: in the order in which they come; members
};

struct Grammar {
  std::vector<Node> nodes;
  NodeId root = kNoNode;

  const Node& operator[](NodeId id) const { return nodes[id]; }
  Node& operator[](NodeId id) { return nodes[id]; }
  NodeId add(Node node) {
    nodes.push_back(std::move(node));
    return static_cast<NodeId>(nodes.size() - 1);
  }
  NodeId add_literal(std::string_view text) {
    return add({.kind = Node::Kind::literal, .literal = std::string(text)});
  }
  size_t n_bytes() const;  // of memory, about
  // Removes what no text can complete: alternatives, optional members, items. False if nothing is left of the
  // root.
  bool prune();
};

}  // namespace lily::engine::grammar
