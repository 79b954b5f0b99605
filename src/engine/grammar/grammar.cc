#include "engine/grammar/grammar.h"

#include <algorithm>

#include "base/error.h"

namespace lily::engine::grammar {
namespace {

using Kind = Node::Kind;

// Whether some text fits, if `fits` is right about the children.
bool completable(const Node& node, const std::vector<bool>& fits) {
  const auto good = [&](NodeId id) { return id != kNoNode && fits[id]; };
  switch (node.kind) {
    case Kind::never:
      return false;
    case Kind::literal:
    case Kind::string:
      return true;
    case Kind::bytes:
    case Kind::text:
      return !node.dfa.empty();
    case Kind::any_of:
      return std::any_of(node.children.begin(), node.children.end(), good);
    case Kind::sequence:
      return std::all_of(node.children.begin(), node.children.end(), good);
    case Kind::array:
      for (int64_t i = 0; i < node.min; ++i) {
        const bool is_first = static_cast<size_t>(i) < node.children.size();
        if (!good(is_first ? node.children[static_cast<size_t>(i)] : node.rest)) return false;
        if (!is_first) break;
      }
      return node.max < 0 || node.min <= node.max;
    case Kind::object:
    case Kind::members: {
      int64_t n_required = 0, n_possible = 0;
      for (const Node::Member& m : node.members) {
        if (m.required && !good(m.value)) return false;
        n_required += m.required ? 1 : 0;
        n_possible += good(m.value) ? 1 : 0;
      }
      const bool open = good(node.rest) && good(node.rest_key);
      return (node.max < 0 || n_required <= node.max) && (node.max < 0 || node.min <= node.max) &&
             (open || n_possible >= node.min);
    }
  }
  return false;
}

}  // namespace

bool Grammar::prune() {
  // The least fixed point: a node that needs itself to be completed never is.
  std::vector<bool> fits(nodes.size());
  std::vector<std::vector<NodeId>> users(nodes.size());
  std::vector<NodeId> todo;
  for (NodeId id = 0; id < nodes.size(); ++id) {
    const auto uses = [&](NodeId child) {
      if (child != kNoNode) users[child].push_back(id);
    };
    for (const NodeId child : nodes[id].children) uses(child);
    for (const Node::Member& m : nodes[id].members) uses(m.value);
    uses(nodes[id].rest);
    uses(nodes[id].rest_key);
    todo.push_back(id);
  }
  while (!todo.empty()) {
    const NodeId id = todo.back();
    todo.pop_back();
    if (fits[id] || !completable(nodes[id], fits)) continue;
    fits[id] = true;
    todo.insert(todo.end(), users[id].begin(), users[id].end());
  }
  for (Node& node : nodes) {
    const auto dead = [&](NodeId id) { return !fits[id]; };
    if (node.kind == Kind::any_of) std::erase_if(node.children, dead);
    if (node.kind == Kind::array) {
      const auto first = std::find_if(node.children.begin(), node.children.end(), dead);
      const auto n = static_cast<int64_t>(first - node.children.begin());
      const bool ends = first != node.children.end() || node.rest == kNoNode || dead(node.rest);
      if (ends) node.max = node.max < 0 ? n : std::min(node.max, n);
    }
    std::erase_if(node.members, [&](const Node::Member& m) { return dead(m.value); });
    if (node.rest != kNoNode && node.kind == Kind::object && (dead(node.rest) || dead(node.rest_key)))
      node.rest = kNoNode;
  }
  return root != kNoNode && fits[root];
}

size_t Grammar::n_bytes() const {
  size_t n = nodes.size() * sizeof(Node);
  for (const Node& node : nodes) {
    n += node.literal.size() + (node.children.size() * sizeof(NodeId)) +
         (node.members.size() * sizeof(Node::Member));
    for (int32_t s = 0; s < node.dfa.n_states(); ++s) n += 5 + node.dfa.edges(s).size_bytes();
  }
  return n;
}

}  // namespace lily::engine::grammar
