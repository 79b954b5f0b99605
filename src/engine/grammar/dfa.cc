#include "engine/grammar/dfa.h"

#include <algorithm>
#include <tuple>

#include "base/error.h"
#include "engine/grammar/utf8.h"

namespace lily::engine::grammar {

void fail_too_large() {
  fail(Fault::user,
       "its automaton has more than {} states; use shorter lengths, fewer repeats or fewer words",
       kMaxDfaStates);
}

Dfa::Dfa(std::vector<std::vector<Edge>> edges, std::vector<bool> accepts) {
  // What reaches an accepting state, backwards.
  const size_t n = accepts.size();
  std::vector<std::vector<int32_t>> sources(n);
  for (size_t s = 0; s < n; ++s)
    for (const Edge& edge : edges[s])
      sources[static_cast<size_t>(edge.to)].push_back(static_cast<int32_t>(s));
  std::vector<bool> lives(accepts);
  std::vector<int32_t> todo;
  for (size_t s = 0; s < n; ++s)
    if (accepts[s]) todo.push_back(static_cast<int32_t>(s));
  while (!todo.empty()) {
    const auto s = static_cast<size_t>(todo.back());
    todo.pop_back();
    for (const int32_t from : sources[s]) {
      if (lives[static_cast<size_t>(from)]) continue;
      lives[static_cast<size_t>(from)] = true;
      todo.push_back(from);
    }
  }
  if (n == 0 || !lives[0]) return;
  std::vector<int32_t> renamed(n, -1);
  int32_t n_alive = 0;
  for (size_t s = 0; s < n; ++s)
    if (lives[s]) renamed[s] = n_alive++;
  begin_.push_back(0);
  for (size_t s = 0; s < n; ++s) {
    if (!lives[s]) continue;
    for (const Edge& edge : edges[s]) {
      const int32_t to = renamed[static_cast<size_t>(edge.to)];
      if (to < 0) continue;
      const bool joins =
          edges_.size() > begin_.back() && edges_.back().to == to && edges_.back().high + 1 == edge.low;
      if (joins) edges_.back().high = edge.high;
      else edges_.push_back({edge.low, edge.high, to});
    }
    begin_.push_back(static_cast<uint32_t>(edges_.size()));
    accepts_.push_back(accepts[s]);
  }
}

int32_t Dfa::next(int32_t state, uint8_t byte) const {
  const auto list = edges(state);
  const auto at =
      std::partition_point(list.begin(), list.end(), [&](const Edge& e) { return e.high < byte; });
  return at == list.end() || at->low > byte ? -1 : at->to;
}

bool Dfa::matches(std::string_view text) const {
  if (empty()) return false;
  int32_t state = 0;
  for (const char c : text) {
    state = next(state, static_cast<uint8_t>(c));
    if (state < 0) return false;
  }
  return accepts(state);
}

namespace {

template <typename Key>
using Edges = std::vector<std::pair<std::pair<uint8_t, uint8_t>, Key>>;

// Adds the edges of a state of text automata: one edge a byte, those to the same key joined.
template <typename Key, typename Next>
Edges<Key> by_byte(const Next& next) {
  Edges<Key> out;
  for (int byte = 0; byte < 256; ++byte) {
    const std::optional<Key> to = next(static_cast<uint8_t>(byte));
    if (!to) continue;
    if (!out.empty() && out.back().first.second == byte - 1 && out.back().second == *to)
      out.back().first.second = static_cast<uint8_t>(byte);
    else out.push_back({{static_cast<uint8_t>(byte), static_cast<uint8_t>(byte)}, *to});
  }
  return out;
}

// Words as a tree. Node 0 is the root.
struct WordTree {
  struct Node {
    std::map<uint8_t, int32_t> children;
    bool ends = false;
    int32_t fallback = 0;  // the longest proper suffix that is a node
  };
  std::vector<Node> nodes{1};

  explicit WordTree(std::span<const std::string> list) {
    for (const std::string& word : list) {
      int32_t at = 0;
      for (const char c : word) {
        const auto found = nodes[static_cast<size_t>(at)].children.find(static_cast<uint8_t>(c));
        if (found != nodes[static_cast<size_t>(at)].children.end()) {
          at = found->second;
          continue;
        }
        const auto id = static_cast<int32_t>(nodes.size());
        if (id >= kMaxDfaStates) fail_too_large();
        nodes[static_cast<size_t>(at)].children.emplace(static_cast<uint8_t>(c), id);
        nodes.emplace_back();
        at = id;
      }
      nodes[static_cast<size_t>(at)].ends = true;
    }
  }
  const Node& operator[](int32_t id) const { return nodes[static_cast<size_t>(id)]; }
  int32_t child(int32_t id, uint8_t byte) const {
    const auto at = (*this)[id].children.find(byte);
    return at == (*this)[id].children.end() ? -1 : at->second;
  }
  // Where a search for the words goes on (Aho and Corasick).
  int32_t search(int32_t id, uint8_t byte) const {
    for (;; id = (*this)[id].fallback) {
      if (const int32_t to = child(id, byte); to >= 0) return to;
      if (id == 0) return 0;
    }
  }
  void link() {
    std::vector<int32_t> queue;
    for (const auto& [byte, id] : nodes[0].children) queue.push_back(id);
    for (size_t i = 0; i < queue.size(); ++i) {
      const int32_t at = queue[i];
      for (const auto& [byte, id] : (*this)[at].children) {
        nodes[static_cast<size_t>(id)].fallback = search((*this)[at].fallback, byte);
        nodes[static_cast<size_t>(id)].ends |= (*this)[(*this)[id].fallback].ends;
        queue.push_back(id);
      }
    }
  }
};

}  // namespace

Dfa intersection(const Dfa& a, const Dfa& b) {
  if (a.empty() || b.empty()) return {};
  using Key = std::pair<int32_t, int32_t>;
  return explore<Key>(
      {0, 0},
      [&](const Key& key) {
        Edges<Key> out;
        const auto x = a.edges(key.first), y = b.edges(key.second);
        for (size_t i = 0, j = 0; i < x.size() && j < y.size();) {
          const uint8_t low = std::max(x[i].low, y[j].low), high = std::min(x[i].high, y[j].high);
          if (low <= high) out.push_back({{low, high}, {x[i].to, y[j].to}});
          if (x[i].high < y[j].high) ++i;
          else ++j;
        }
        return out;
      },
      [&](const Key& key) { return a.accepts(key.first) && b.accepts(key.second); });
}

Dfa words(std::span<const std::string> list) {
  if (list.empty()) return {};
  const WordTree tree(list);
  return explore<int32_t>(
      0,
      [&](const int32_t& id) {
        Edges<int32_t> out;
        for (const auto& [byte, to] : tree[id].children) out.push_back({{byte, byte}, to});
        return out;
      },
      [&](const int32_t& id) { return tree[id].ends; });
}

Dfa characters(int64_t min, int64_t max) {
  using Key = std::pair<Utf8State, int64_t>;
  const int64_t most = max < 0 ? min : max;
  return explore<Key>(
      {Utf8State::boundary, 0},
      [&](const Key& key) {
        return by_byte<Key>([&](uint8_t byte) -> std::optional<Key> {
          const std::optional<Utf8State> to = utf8_next(key.first, byte);
          if (!to) return std::nullopt;
          if (*to != Utf8State::boundary) return Key{*to, key.second};
          if (key.second == most && max >= 0) return std::nullopt;
          return Key{*to, std::min(key.second + 1, most)};
        });
      },
      [&](const Key& key) { return key.first == Utf8State::boundary && key.second >= min; });
}

Dfa all_but(std::span<const std::string> list) {
  const WordTree tree(list);
  using Key = std::pair<Utf8State, int32_t>;  // -1: it has left the tree
  return explore<Key>(
      {Utf8State::boundary, 0},
      [&](const Key& key) {
        return by_byte<Key>([&](uint8_t byte) -> std::optional<Key> {
          const std::optional<Utf8State> to = utf8_next(key.first, byte);
          if (!to) return std::nullopt;
          return Key{*to, key.second < 0 ? -1 : tree.child(key.second, byte)};
        });
      },
      [&](const Key& key) {
        return key.first == Utf8State::boundary && (key.second < 0 || !tree[key.second].ends);
      });
}

Dfa texts_without(std::span<const std::string> list) {
  WordTree tree(list);
  tree.link();
  using Key = std::pair<Utf8State, int32_t>;
  return explore<Key>(
      {Utf8State::boundary, 0},
      [&](const Key& key) {
        return by_byte<Key>([&](uint8_t byte) -> std::optional<Key> {
          const std::optional<Utf8State> to = utf8_next(key.first, byte);
          const int32_t at = tree.search(key.second, byte);
          if (!to || tree[at].ends) return std::nullopt;
          return Key{*to, at};
        });
      },
      [&](const Key& key) { return key.first == Utf8State::boundary; });
}

}  // namespace lily::engine::grammar
