// Deterministic automata over bytes: what regular expressions, number ranges, lengths and word lists of a
// schema become. Every state of a finished one can reach an accepting state, so whoever follows it is never
// stuck.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lily::engine::grammar {

// More states are refused: a schema that needs them is an attack or a mistake.
inline constexpr int kMaxDfaStates = 20'000;

class Dfa {
 public:
  struct Edge {
    uint8_t low, high;  // bytes, both included
    int32_t to;
  };
  // By state: ascending edges that do not overlap, and whether it accepts. State 0 is the start.
  Dfa(std::vector<std::vector<Edge>> edges, std::vector<bool> accepts);
  Dfa() = default;  // accepts nothing

  bool empty() const { return accepts_.empty(); }
  int32_t n_states() const { return static_cast<int32_t>(accepts_.size()); }
  std::span<const Edge> edges(int32_t state) const {
    const auto s = static_cast<size_t>(state);
    return std::span(edges_).subspan(begin_[s], begin_[s + 1] - begin_[s]);
  }
  bool accepts(int32_t state) const { return accepts_[static_cast<size_t>(state)]; }
  int32_t next(int32_t state, uint8_t byte) const;  // -1: none
  bool matches(std::string_view text) const;

 private:
  std::vector<Edge> edges_;
  std::vector<uint32_t> begin_;  // [n_states + 1]
  std::vector<bool> accepts_;
};

// Follows keys from `start`; `edges_of` gives (low, high, key) in ascending order. Throws Error(Fault::user)
// above kMaxDfaStates.
template <typename Key>
Dfa explore(
    const Key& start,
    const std::function<std::vector<std::pair<std::pair<uint8_t, uint8_t>, Key>>(const Key&)>& edges_of,
    const std::function<bool(const Key&)>& accepts);

Dfa intersection(const Dfa& a, const Dfa& b);
// Exactly these words; none: the empty automaton.
Dfa words(std::span<const std::string> list);
// UTF-8 texts of min to max characters (code points); max -1: no bound.
Dfa characters(int64_t min, int64_t max);
// UTF-8 texts other than these words.
Dfa all_but(std::span<const std::string> list);
// UTF-8 texts in which none of these words occurs.
Dfa texts_without(std::span<const std::string> list);

[[noreturn]] void fail_too_large();

template <typename Key>
Dfa explore(
    const Key& start,
    const std::function<std::vector<std::pair<std::pair<uint8_t, uint8_t>, Key>>(const Key&)>& edges_of,
    const std::function<bool(const Key&)>& accepts) {
  std::map<Key, int32_t> ids{{start, 0}};
  std::vector<Key> keys{start};
  std::vector<std::vector<Dfa::Edge>> edges;
  std::vector<bool> accepting;
  for (size_t i = 0; i < keys.size(); ++i) {
    const Key key = keys[i];
    std::vector<Dfa::Edge> out;
    for (const auto& [range, to] : edges_of(key)) {
      const auto [at, is_new] = ids.emplace(to, static_cast<int32_t>(keys.size()));
      if (is_new) {
        if (keys.size() >= static_cast<size_t>(kMaxDfaStates)) fail_too_large();
        keys.push_back(to);
      }
      out.push_back({range.first, range.second, at->second});
    }
    edges.push_back(std::move(out));
    accepting.push_back(accepts(key));
  }
  return Dfa(std::move(edges), std::move(accepting));
}

}  // namespace lily::engine::grammar
