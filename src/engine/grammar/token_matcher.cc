#include "engine/grammar/token_matcher.h"

#include <utility>

namespace lily::engine::grammar {

TokenMatcher::TokenMatcher(Grammar grammar, const TokenTrie& trie, const text::Tokenizer& tokenizer,
                           const TokenMatcherLimits& limits)
    : grammar_(std::move(grammar)), trie_(trie), tokenizer_(tokenizer), limits_(limits), matcher_(grammar_) {}

size_t TokenMatcher::n_bytes() const {
  const std::lock_guard lock(mutex_);
  return grammar_.n_bytes() + matcher_.n_bytes() + mask_bytes_;
}

int64_t TokenMatcher::n_masks_made() const {
  const std::lock_guard lock(mutex_);
  return n_masks_made_;
}

void TokenMatcher::make_room(std::span<State* const> kept) {
  if (matcher_.n_bytes() <= limits_.max_state_bytes) return;
  std::vector<State*> all(kept.begin(), kept.end());
  for (Cursor* const cursor : cursors_) all.push_back(&cursor->state_);
  matcher_.forget(all);
  masks_.clear();
  uses_.clear();
  mask_bytes_ = 0;
}

const TokenMatcher::Mask& TokenMatcher::mask_of(State& state) {
  if (const auto known = masks_.find(state); known != masks_.end()) {
    uses_.splice(uses_.begin(), uses_, known->second.use);
    return known->second.words;
  }
  ++n_masks_made_;
  Mask words((static_cast<size_t>(tokenizer_.n_tokens()) + 63) / 64);
  std::vector<State> path(static_cast<size_t>(trie_.max_depth()) + 1, Matcher::kDead);  // states by depth
  std::vector<State*> kept{&state};
  for (State& s : path) kept.push_back(&s);
  path[0] = state;
  const auto nodes = trie_.nodes();
  for (size_t i = 0; i < nodes.size();) {
    const TokenTrie::Node& node = nodes[i];
    const State to = matcher_.next(path[node.depth - 1], node.byte);
    if (to == Matcher::kDead) {
      i = node.end;
      continue;
    }
    path[node.depth] = to;
    for (const int32_t id : trie_.tokens_of(node))
      words[static_cast<size_t>(id) / 64] |= uint64_t{1} << (id % 64);
    if (matcher_.n_bytes() > limits_.max_state_bytes) {
      for (size_t d = node.depth + size_t{1}; d < path.size(); ++d) path[d] = Matcher::kDead;
      make_room(kept);
    }
    ++i;
  }
  const size_t bytes = words.size() * sizeof(uint64_t) + 128;
  while (!uses_.empty() && mask_bytes_ + bytes > limits_.max_mask_bytes) {
    masks_.erase(uses_.back());
    uses_.pop_back();
    mask_bytes_ -= bytes;
  }
  mask_bytes_ += bytes;
  uses_.push_front(state);
  return masks_.emplace(state, CachedMask{std::move(words), uses_.begin()}).first->second.words;
}

// ---- Cursors

TokenMatcher::Cursor::Cursor(TokenMatcher& matcher) : matcher_(matcher) {
  const std::lock_guard lock(matcher_.mutex_);
  state_ = matcher_.matcher_.start();
  matcher_.cursors_.insert(this);
}

TokenMatcher::Cursor::~Cursor() {
  const std::lock_guard lock(matcher_.mutex_);
  matcher_.cursors_.erase(this);
}

void TokenMatcher::Cursor::restart() {
  const std::lock_guard lock(matcher_.mutex_);
  state_ = matcher_.matcher_.start();
}

bool TokenMatcher::Cursor::complete() const {
  const std::lock_guard lock(matcher_.mutex_);
  return matcher_.matcher_.complete(state_);
}

bool TokenMatcher::Cursor::finished() const {
  const std::lock_guard lock(matcher_.mutex_);
  return matcher_.matcher_.finished(state_);
}

bool TokenMatcher::Cursor::allows(int32_t token) const {
  if (matcher_.tokenizer_.is_added(token)) return false;
  const std::string_view bytes = matcher_.tokenizer_.token_bytes(token);
  const std::lock_guard lock(matcher_.mutex_);
  return !bytes.empty() && matcher_.matcher_.next(state_, bytes) != Matcher::kDead;
}

void TokenMatcher::Cursor::allow(std::span<uint64_t> words) const {
  const std::lock_guard lock(matcher_.mutex_);
  State state = state_;
  const Mask& mask = matcher_.mask_of(state);
  for (size_t i = 0; i < std::min(words.size(), mask.size()); ++i) words[i] |= mask[i];
}

bool TokenMatcher::Cursor::read(std::string_view bytes) {
  const std::lock_guard lock(matcher_.mutex_);
  const State to = matcher_.matcher_.next(state_, bytes);
  if (to == Matcher::kDead) return false;
  state_ = to;
  matcher_.make_room({});
  return true;
}

bool TokenMatcher::Cursor::accept(int32_t token) {
  if (matcher_.tokenizer_.is_added(token)) return false;
  const std::string_view bytes = matcher_.tokenizer_.token_bytes(token);
  return !bytes.empty() && read(bytes);
}

}  // namespace lily::engine::grammar
