// What constraints have to know of a checkpoint's tokens, found once.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "engine/grammar/token_trie.h"
#include "text/tokenizer.h"

namespace lily::engine::grammar {

// Said in the model's own voice where its thinking has to end.
inline constexpr std::string_view kClosingSentence =
    "\n\nI have thought about this long enough. I will answer now with what I have.\n";

// Any thread.
class Vocabulary {
 public:
  // The tokenizer must outlive this.
  Vocabulary(const text::Tokenizer& tokenizer, std::vector<int32_t> stop_ids);

  const text::Tokenizer& tokenizer() const { return tokenizer_; }
  const TokenTrie& trie() const;  // built on first use

  bool is_stop(int32_t id) const;
  std::span<const int32_t> stop_ids() const { return stop_ids_; }
  int32_t end_of_turn() const { return end_of_turn_; }  // the stop id that a finished answer has; -1: none
  int32_t think_close() const { return think_close_; }  // these are -1 where the tokenizer has none
  int32_t call_open() const { return call_open_; }
  int32_t call_close() const { return call_close_; }
  // The closing sentence, </think> and the empty line that the chat template has after it.
  std::span<const int32_t> closing() const { return closing_; }
  // Plain tokens with a "=": only these can complete "<function=".
  std::span<const int32_t> with_equals_sign() const { return with_equals_sign_; }

 private:
  const text::Tokenizer& tokenizer_;
  std::vector<int32_t> stop_ids_, closing_, with_equals_sign_;
  int32_t end_of_turn_, think_close_, call_open_, call_close_;
  mutable std::once_flag trie_once_;
  mutable std::unique_ptr<const TokenTrie> trie_;
};

}  // namespace lily::engine::grammar
