#include "engine/grammar/vocabulary.h"

#include <algorithm>
#include <string>
#include <utility>

namespace lily::engine::grammar {

Vocabulary::Vocabulary(const text::Tokenizer& tokenizer, std::vector<int32_t> stop_ids)
    : tokenizer_(tokenizer),
      stop_ids_(std::move(stop_ids)),
      think_close_(tokenizer.id_of("</think>").value_or(-1)),
      call_open_(tokenizer.id_of("<tool_call>").value_or(-1)),
      call_close_(tokenizer.id_of("</tool_call>").value_or(-1)) {
  const int32_t turn = tokenizer.id_of("<|im_end|>").value_or(-1);
  end_of_turn_ = is_stop(turn) ? turn : stop_ids_.empty() ? -1 : stop_ids_[0];
  if (think_close_ >= 0)
    closing_ = tokenizer.encode(std::string(kClosingSentence) + "</think>\n\n", text::AddedTokens::all);
  for (int32_t id = 0; id < tokenizer.n_tokens(); ++id)
    if (!tokenizer.is_added(id) && tokenizer.token_bytes(id).find('=') != std::string_view::npos)
      with_equals_sign_.push_back(id);
}

bool Vocabulary::is_stop(int32_t id) const {
  return std::find(stop_ids_.begin(), stop_ids_.end(), id) != stop_ids_.end();
}

const TokenTrie& Vocabulary::trie() const {
  std::call_once(trie_once_, [&] { trie_ = std::make_unique<const TokenTrie>(tokenizer_); });
  return *trie_;
}

}  // namespace lily::engine::grammar
