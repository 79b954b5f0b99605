// From a request to the constraint on its answer.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/chat_request.h"
#include "engine/grammar/chat_constraint.h"
#include "engine/grammar/loop_guard.h"
#include "engine/grammar/token_matcher.h"
#include "engine/grammar/vocabulary.h"
#include "engine/request.h"
#include "text/tokenizer.h"

namespace lily::engine::grammar {

// Tokens that a closed thinking leaves to the answer; where there is less room than twice that, half of it.
inline constexpr int32_t kAnswerTokens = 1024;

struct GrammarOptions {
  LoopLimits loops;
  int max_grammars = 16;  // that are kept for later requests
  size_t max_grammar_bytes = size_t{256} << 20;
  TokenMatcherLimits matcher;
};

// Thread-safe. Grammars are compiled once and shared by requests that ask for the same; so are their masks.
class GrammarCompiler {
 public:
  // The tokenizer must outlive this and all constraints made here.
  GrammarCompiler(const text::Tokenizer& tokenizer, std::vector<int32_t> stop_ids,
                  GrammarOptions options = {});

  struct Answer {
    bool starts_in_thinking = false;  // RenderedPrompt::starts_in_thinking
    int32_t n_room = 0;               // tokens that may be written, at most
  };
  // Null if nothing constrains the answer. Throws Error(Fault::user) for schemas that are not supported and
  // for tool choices without their tools.
  std::unique_ptr<TokenConstraint> constraint_for(const ChatRequest& request, const Answer& answer);
  std::unique_ptr<TokenConstraint> constraint_for(const TextRequest& request);

  const Vocabulary& vocabulary() const { return *vocabulary_; }
  int n_grammars() const;

 private:
  using Shared = std::shared_ptr<TokenMatcher>;
  Shared matcher(const std::string& key, const std::function<Grammar()>& compile);
  Shared text_matcher(const OutputFormat& format);

  const std::shared_ptr<const Vocabulary> vocabulary_;
  const GrammarOptions options_;
  mutable std::mutex mutex_;                        // guards what follows
  std::list<std::pair<std::string, Shared>> kept_;  // latest use first
};

}  // namespace lily::engine::grammar
