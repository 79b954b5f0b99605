#include "engine/grammar/token_trie.h"

#include <algorithm>
#include <bitset>
#include <string_view>

namespace lily::engine::grammar {

TokenTrie::TokenTrie(const text::Tokenizer& tokenizer) {
  std::vector<std::pair<std::string_view, int32_t>> sorted;
  std::bitset<256> single;
  for (int32_t id = 0; id < tokenizer.n_tokens(); ++id) {
    const std::string_view bytes = tokenizer.token_bytes(id);
    if (bytes.empty() || bytes.size() > 4096 || tokenizer.is_added(id)) continue;
    sorted.emplace_back(bytes, id);
    if (bytes.size() == 1) single.set(static_cast<uint8_t>(bytes[0]));
  }
  has_all_bytes_ = single.all();
  std::sort(sorted.begin(), sorted.end());
  std::vector<uint32_t> open;  // nodes of the text before, by depth
  std::string_view before;
  for (const auto& [bytes, id] : sorted) {
    const auto [a, b] = std::mismatch(bytes.begin(), bytes.end(), before.begin(), before.end());
    auto shared = static_cast<size_t>(a - bytes.begin());
    for (; open.size() > shared; open.pop_back())
      nodes_[open.back()].end = static_cast<uint32_t>(nodes_.size());
    for (; shared < bytes.size(); ++shared) {
      open.push_back(static_cast<uint32_t>(nodes_.size()));
      nodes_.push_back({.end = 0,
                        .first_token = static_cast<uint32_t>(tokens_.size()),
                        .depth = static_cast<uint16_t>(shared + 1),
                        .n_tokens = 0,
                        .byte = static_cast<uint8_t>(bytes[shared])});
    }
    tokens_.push_back(id);
    ++nodes_[open.back()].n_tokens;
    max_depth_ = std::max(max_depth_, static_cast<int>(bytes.size()));
    before = bytes;
  }
  for (; !open.empty(); open.pop_back()) nodes_[open.back()].end = static_cast<uint32_t>(nodes_.size());
}

}  // namespace lily::engine::grammar
