#include "engine/grammar/chat_constraint.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace lily::engine::grammar {
namespace {

constexpr std::string_view kBareCall = "<function=";
constexpr int kMaxNewlines = 2;
constexpr size_t kMaxProbeBytes = 320;

bool is_blank(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

// Bytes that are missing of the character which the text ends in.
int pending_bytes(int pending, std::string_view bytes) {
  for (const char c : bytes) {
    const auto byte = static_cast<uint8_t>(c);
    if (byte < 0x80) pending = 0;
    else if (byte < 0xc0) pending = std::max(0, pending - 1);
    else pending = byte < 0xe0 ? 1 : byte < 0xf0 ? 2 : 3;
  }
  return pending;
}

}  // namespace

ChatConstraint::ChatConstraint(std::shared_ptr<const Vocabulary> vocabulary, Demands demands,
                               text::ToolSet tools)
    : vocabulary_(std::move(vocabulary)),
      demands_(std::move(demands)),
      tools_(std::move(tools)),
      guard_(demands_.loops),
      phase_(demands_.starts_in_thinking ? Phase::thinking : Phase::text) {
  if (demands_.text) text_.emplace(*demands_.text);
  if (demands_.calls) call_.emplace(*demands_.calls);
  if (phase_ == Phase::thinking && demands_.thinking_budget == 0) close_thinking(StopDetail::thinking_budget);
}

bool ChatConstraint::is_free() const {
  if (!forced_.empty()) return false;
  switch (phase_) {
    case Phase::thinking:
    case Phase::thinking_call:
      return !is_due() && !demands_.calls_forbidden;
    case Phase::text:
      return !is_due() && !demands_.calls_forbidden && demands_.calls == nullptr;
    case Phase::call:
      return demands_.calls == nullptr;
    case Phase::after_call:
      return false;
  }
  return false;
}

bool ChatConstraint::may_open_call() const {
  return demands_.calls != nullptr && !text_begun_ && !demands_.calls_forbidden;
}

bool ChatConstraint::allows_newlines(std::string_view bytes) const {
  return !bytes.empty() && bytes.find_first_not_of('\n') == std::string_view::npos &&
         n_newlines_ + static_cast<int>(bytes.size()) <= kMaxNewlines;
}

bool ChatConstraint::completes_bare_call(std::string_view bytes) const {
  size_t n = n_bare_;
  bool at_line_start = at_line_start_;
  for (const char c : bytes) {
    if (n > 0 && c == kBareCall[n]) {
      if (++n == kBareCall.size()) return true;
      continue;
    }
    n = at_line_start && c == '<' ? 1 : 0;
    at_line_start = c == '\n';
  }
  return false;
}

bool ChatConstraint::allows(int32_t token) {
  if (!forced_.empty()) return token == forced_.front();
  const Vocabulary& v = *vocabulary_;
  const bool stops = v.is_stop(token);
  switch (phase_) {
    case Phase::thinking:
    case Phase::thinking_call:
      if (stops) return !is_due();
      return !(demands_.calls_forbidden && token == v.call_open());
    case Phase::text: {
      if (demands_.call_required)
        return token == v.call_open() ||
               (!v.tokenizer().is_added(token) && allows_newlines(v.tokenizer().token_bytes(token)));
      if (text_) {
        if (stops) return text_->complete();
        if (token == v.call_open()) return may_open_call();
        return text_->allows(token);
      }
      if (demands_.calls_forbidden && token == v.call_open()) return false;
      if (stops || v.tokenizer().is_added(token)) return true;
      return !(demands_.calls_forbidden || call_) || !completes_bare_call(v.tokenizer().token_bytes(token));
    }
    case Phase::call:
      if (!call_) return true;
      if (token == v.call_close()) return call_->complete();
      return call_->allows(token);
    case Phase::after_call:
      if (stops) return true;
      if (demands_.single_call) return false;
      return token == v.call_open() ||
             (!v.tokenizer().is_added(token) && allows_newlines(v.tokenizer().token_bytes(token)));
  }
  return false;
}

bool ChatConstraint::allowed(TokenMask& mask) {
  if (is_free()) return false;
  const auto allow = [&](int32_t id) {
    if (id >= 0 && id < mask.n_tokens()) mask.allow(id);
  };
  const auto ask = [&](std::span<const int32_t> ids) {
    for (const int32_t id : ids) {
      if (id < 0 || id >= mask.n_tokens()) continue;
      if (allows(id)) mask.allow(id);
      else mask.forbid(id);
    }
  };
  const Vocabulary& v = *vocabulary_;
  const int32_t tags[] = {v.call_open(), v.call_close()};
  if (!forced_.empty()) {
    allow(forced_.front());
    return true;
  }
  const bool in_grammar =
      (phase_ == Phase::text && text_ && !demands_.call_required) || (phase_ == Phase::call && call_);
  const bool only_newlines = phase_ == Phase::after_call || (phase_ == Phase::text && demands_.call_required);
  if (in_grammar) {
    (phase_ == Phase::call ? call_ : text_)->allow(mask.words());
  } else if (only_newlines) {
    for (int32_t id = 0; id < mask.n_tokens(); ++id)
      if (v.tokenizer().token_bytes(id).starts_with('\n') && allows(id)) mask.allow(id);
  } else {
    mask.allow_all();
    if (phase_ == Phase::text) ask(v.with_equals_sign());
  }
  ask(v.stop_ids());
  ask(tags);
  return true;
}

void ChatConstraint::accept(int32_t token) {
  const bool was_forced = !forced_.empty();
  if (was_forced) forced_.pop_front();
  const bool loops = !was_forced && guard_.push(token);
  if (vocabulary_->is_stop(token)) return;
  switch (phase_) {
    case Phase::thinking:
      read_thinking(token);
      break;
    case Phase::thinking_call:
      probe_call(token);
      break;
    case Phase::text:
      read_text(token);
      break;
    case Phase::call:
      if (token == vocabulary_->call_close()) {
        n_newlines_ = 0;
        phase_ = call_ || demands_.single_call ? Phase::after_call : Phase::text;
        at_line_start_ = true;
        if (demands_.single_call) end_answer(detail_);
      } else if (call_) {
        const bool fits = call_->accept(token);
        if (!fits && !was_forced) fail(Fault::user, "token {} does not fit the call's grammar", token);
      }
      break;
    case Phase::after_call:
      if (token == vocabulary_->call_open()) begin_call();
      else n_newlines_ += static_cast<int>(vocabulary_->tokenizer().token_bytes(token).size());
      break;
  }
  if (!loops || !forced_.empty()) return;
  if (phase_ == Phase::thinking) close_thinking(StopDetail::loop);
  else if (phase_ != Phase::thinking_call) end_answer(StopDetail::loop);
}

void ChatConstraint::read_thinking(int32_t token) {
  const Vocabulary& v = *vocabulary_;
  if (token == v.think_close()) return begin_text();
  if (token == v.call_open() && demands_.calls_possible) {
    if (call_) return begin_call();
    phase_ = Phase::thinking_call;
    probe_.clear();
    return;
  }
  ++n_thinking_;
  n_pending_bytes_ = pending_bytes(n_pending_bytes_, v.tokenizer().token_bytes(token));
  if (!forced_.empty()) return;
  if (demands_.thinking_budget >= 0 && n_thinking_ >= demands_.thinking_budget) closing_due_ = true;
  // Bytes that never become a character must not put it off for ever.
  const bool overdue = n_thinking_ >= demands_.thinking_budget + 3;
  if (closing_due_ && (n_pending_bytes_ == 0 || overdue)) close_thinking(StopDetail::thinking_budget);
}

// The thinking goes on unless <function=NAME> with a declared name follows, or JSON that may be a call.
void ChatConstraint::probe_call(int32_t token) {
  const Vocabulary& v = *vocabulary_;
  const bool is_tag = v.tokenizer().is_added(token);
  if (!is_tag) probe_ += v.tokenizer().token_bytes(token);
  const size_t begin =
      std::min(static_cast<size_t>(std::find_if_not(probe_.begin(), probe_.end(), is_blank) - probe_.begin()),
               probe_.size());
  const std::string_view text = std::string_view(probe_).substr(begin);
  if (!is_tag && probe_.size() <= kMaxProbeBytes) {
    if (text.starts_with('{')) {
      phase_ = Phase::call;
      return;
    }
    if (text.size() <= kBareCall.size() ? kBareCall.starts_with(text) : text.starts_with(kBareCall)) {
      const size_t end = text.find('>');
      if (end == std::string_view::npos) return;
      if (tools_.find(text.substr(kBareCall.size(), end - kBareCall.size())) != nullptr) {
        phase_ = Phase::call;
        return;
      }
    }
  }
  phase_ = Phase::thinking;
  if (is_tag) read_thinking(token);
}

void ChatConstraint::read_text(int32_t token) {
  const Vocabulary& v = *vocabulary_;
  if (token == v.call_open() && (demands_.calls_possible || call_)) {
    if (call_ || demands_.single_call) begin_call();
    return;
  }
  const std::string_view bytes = v.tokenizer().token_bytes(token);
  if (demands_.call_required) {
    n_newlines_ += static_cast<int>(bytes.size());
    return;
  }
  if (text_) {
    const bool fits = text_->accept(token);
    if (!fits && token != v.think_close())
      fail(Fault::user, "token {} does not fit the text's grammar", token);
    text_begun_ = text_begun_ || std::any_of(bytes.begin(), bytes.end(), [](char c) { return !is_blank(c); });
    return;
  }
  if (v.tokenizer().is_added(token)) {
    n_bare_ = 0;
    at_line_start_ = false;
    return;
  }
  for (const char c : bytes) {
    if (n_bare_ > 0 && n_bare_ < kBareCall.size() && c == kBareCall[n_bare_]) {
      ++n_bare_;
      continue;
    }
    n_bare_ = at_line_start_ && c == '<' ? 1 : 0;
    at_line_start_ = c == '\n';
  }
}

void ChatConstraint::begin_text() {
  phase_ = Phase::text;
  guard_.reset();
  closing_due_ = false;
  at_line_start_ = true;
  n_bare_ = 0;
}

void ChatConstraint::begin_call() {
  phase_ = Phase::call;
  if (call_) call_->restart();
}

void ChatConstraint::close_thinking(StopDetail why) {
  const auto closing = vocabulary_->closing();
  if (closing.empty()) return;
  detail_ = why;
  forced_.assign(closing.begin(), closing.end());
  guard_.reset();
  closing_due_ = false;
}

void ChatConstraint::end_answer(StopDetail why) {
  if (vocabulary_->end_of_turn() < 0) return;
  detail_ = why;
  forced_.assign(1, vocabulary_->end_of_turn());
}

}  // namespace lily::engine::grammar
