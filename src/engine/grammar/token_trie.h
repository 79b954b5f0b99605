// The bytes of a vocabulary as a tree, so that a text automaton reads what tokens have in common only once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "text/tokenizer.h"

namespace lily::engine::grammar {

// Immutable once built; any thread. Added tokens are left out: inside a constrained text they do not exist.
class TokenTrie {
 public:
  explicit TokenTrie(const text::Tokenizer& tokenizer);

  // In the order of a walk: a node's descendants follow it, up to `end`.
  struct Node {
    uint32_t end;          // the index behind its last descendant
    uint32_t first_token;  // into tokens()
    uint16_t depth;        // bytes of its text, 1 and up
    uint16_t n_tokens;     // whose text ends here
    uint8_t byte;
  };
  std::span<const Node> nodes() const { return nodes_; }
  std::span<const int32_t> tokens_of(const Node& node) const {
    return std::span(tokens_).subspan(node.first_token, node.n_tokens);
  }
  int max_depth() const { return max_depth_; }
  // Bytes without a token of their own: texts that need them cannot always be written.
  bool has_all_bytes() const { return has_all_bytes_; }
  size_t n_bytes() const { return nodes_.size() * sizeof(Node) + tokens_.size() * sizeof(int32_t); }

 private:
  std::vector<Node> nodes_;
  std::vector<int32_t> tokens_;
  int max_depth_ = 0;
  bool has_all_bytes_ = false;
};

}  // namespace lily::engine::grammar
