// What a chat request demands of its answer, token by token: the end of the thinking, the form of the text,
// calls, and an end to loops. Built by GrammarCompiler.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "engine/grammar/loop_guard.h"
#include "engine/grammar/token_matcher.h"
#include "engine/grammar/vocabulary.h"
#include "engine/request.h"
#include "text/tool_schema.h"

namespace lily::engine::grammar {

class ChatConstraint final : public TokenConstraint {
 public:
  struct Demands {
    bool starts_in_thinking = false;
    int32_t thinking_budget = -1;  // tokens; -1: no bound
    bool calls_possible = false;   // there are tools, and calls are read as such
    bool calls_forbidden = false;
    bool call_required = false;
    bool single_call = false;             // the answer ends after its first call
    std::shared_ptr<TokenMatcher> calls;  // what stands in a call; null: anything
    std::shared_ptr<TokenMatcher> text;   // the visible text; null: anything
    LoopLimits loops;
  };
  // `tools`: those declared, to tell a call inside the thinking from a mention of one.
  ChatConstraint(std::shared_ptr<const Vocabulary> vocabulary, Demands demands, text::ToolSet tools);

  bool allowed(TokenMask& mask) override;
  bool allows(int32_t token) override;
  bool can_ask_single() const override { return true; }
  bool is_free() const override;
  void accept(int32_t token) override;
  StopDetail detail() const override { return detail_; }

 private:
  enum class Phase : uint8_t {
    thinking,
    thinking_call,  // after <tool_call> in the thinking: a call if a declared function follows
    text,
    call,  // constrained, or one that must be the last
    after_call,
  };

  void begin_text();
  void begin_call();
  void close_thinking(StopDetail why);
  void end_answer(StopDetail why);
  void read_thinking(int32_t token);
  void read_text(int32_t token);
  void probe_call(int32_t token);
  bool is_due() const { return demands_.text != nullptr || demands_.call_required; }
  bool may_open_call() const;
  bool allows_newlines(std::string_view bytes) const;
  // Whether bytes of the text would complete "<function=" at the start of a line.
  bool completes_bare_call(std::string_view bytes) const;

  const std::shared_ptr<const Vocabulary> vocabulary_;
  const Demands demands_;
  const text::ToolSet tools_;
  std::optional<TokenMatcher::Cursor> text_, call_;
  LoopGuard guard_;
  Phase phase_;
  StopDetail detail_ = StopDetail::none;
  std::deque<int32_t> forced_;  // the tokens that must come next
  int32_t n_thinking_ = 0;
  bool closing_due_ = false;   // at the next end of a character
  int n_pending_bytes_ = 0;    // of an unfinished character of the thinking
  int n_newlines_ = 0;         // before what is due
  bool text_begun_ = false;    // the constrained text has more than white space
  bool at_line_start_ = true;  // of the text
  size_t n_bare_ = 0;          // bytes of "<function=" that have been read
  std::string probe_;
};

}  // namespace lily::engine::grammar
