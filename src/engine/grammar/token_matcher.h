// A grammar in tokens: which ones may come, and what follows from one. Shared by all requests with the same
// grammar, so that states, transitions and masks are computed once.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "engine/grammar/matcher.h"
#include "engine/grammar/token_trie.h"
#include "text/tokenizer.h"

namespace lily::engine::grammar {

struct TokenMatcherLimits {
  size_t max_state_bytes = size_t{32} << 20;  // then states that no cursor stands at are forgotten
  size_t max_mask_bytes = size_t{16} << 20;   // then the mask that was used longest ago goes
};

// Any thread; one call at a time gets its turn.
class TokenMatcher {
 public:
  // The trie and the tokenizer must outlive this.
  TokenMatcher(Grammar grammar, const TokenTrie& trie, const text::Tokenizer& tokenizer,
               const TokenMatcherLimits& limits = {});

  // Where one text stands. Must not outlive its matcher; moves nowhere.
  class Cursor {
   public:
    explicit Cursor(TokenMatcher& matcher);
    ~Cursor();
    Cursor(const Cursor&) = delete;
    Cursor& operator=(const Cursor&) = delete;

    void restart();
    // The text may end here; nothing else may come.
    bool complete() const;
    bool finished() const;
    // Tokens of plain text only: others are never allowed.
    bool allows(int32_t token) const;
    // Sets the bits of the tokens that are allowed.
    void allow(std::span<uint64_t> words) const;
    // The text goes on with these bytes or this token; false if it cannot, and the cursor stands.
    bool read(std::string_view bytes);
    bool accept(int32_t token);

   private:
    friend class TokenMatcher;
    TokenMatcher& matcher_;
    Matcher::State state_ = Matcher::kDead;
  };

  size_t n_bytes() const;
  int64_t n_masks_made() const;

 private:
  using State = Matcher::State;
  using Mask = std::vector<uint64_t>;
  struct CachedMask {
    Mask words;
    std::list<State>::iterator use;
  };

  const Mask& mask_of(State& state);
  // Keeps what cursors stand at, and these.
  void make_room(std::span<State* const> kept);

  const Grammar grammar_;
  const TokenTrie& trie_;
  const text::Tokenizer& tokenizer_;
  const TokenMatcherLimits limits_;

  mutable std::mutex mutex_;  // guards what follows and the cursors' states
  Matcher matcher_;
  std::unordered_set<Cursor*> cursors_;
  std::unordered_map<State, CachedMask> masks_;
  std::list<State> uses_;  // latest first
  size_t mask_bytes_ = 0;
  int64_t n_masks_made_ = 0;
};

}  // namespace lily::engine::grammar
