#include "engine/prefix_cache.h"

#include <algorithm>
#include <utility>

namespace lily::engine {
namespace {

bool begins_with(std::span<const int32_t> tokens, const std::vector<int32_t>& prefix) {
  return prefix.size() <= tokens.size() && std::equal(prefix.begin(), prefix.end(), tokens.begin());
}

}  // namespace

const Snapshot* PrefixCache::find(std::span<const int32_t> prompt, int64_t max_tokens) {
  auto best = snapshots_.end();
  for (auto it = snapshots_.begin(); it != snapshots_.end(); ++it) {
    if (static_cast<int64_t>(it->tokens.size()) > max_tokens) continue;
    if (best != snapshots_.end() && it->tokens.size() <= best->tokens.size()) continue;
    if (begins_with(prompt, it->tokens)) best = it;
  }
  if (best == snapshots_.end()) return nullptr;
  snapshots_.splice(snapshots_.begin(), snapshots_, best);
  return &snapshots_.front();
}

bool PrefixCache::contains(std::span<const int32_t> tokens) const {
  return std::any_of(snapshots_.begin(), snapshots_.end(), [&](const Snapshot& s) {
    return s.tokens.size() == tokens.size() && begins_with(tokens, s.tokens);
  });
}

void PrefixCache::insert(Snapshot snapshot) {
  if (!snapshot.session.empty())
    snapshots_.remove_if(
        [&](const Snapshot& s) { return s.session == snapshot.session && s.kind == snapshot.kind; });
  snapshots_.push_front(std::move(snapshot));
}

bool PrefixCache::evict() {
  if (snapshots_.empty()) return false;
  snapshots_.pop_back();
  return true;
}

}  // namespace lily::engine
