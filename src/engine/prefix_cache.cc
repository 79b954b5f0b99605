#include "engine/prefix_cache.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace lily::engine {
namespace {

// A named session is in use as long as at most so many snapshots were used or taken after its own.
constexpr int64_t kUsesOfALiveSession = 32;
constexpr int64_t kTokensExplained = 8;  // on each side of a difference
constexpr size_t kMaxPartings = 256;
// Attending to so many keys is as much work as everything else that a token of the real model needs: 4.87
// GFLOP in matrix products, 0.164 MFLOP a key.
constexpr double kKeysWorthAToken = 29'700;

// In tokens that have nothing before them.
double work_to_read(int64_t n_tokens) {
  const auto n = static_cast<double>(n_tokens);
  return n + n * n / (2 * kKeysWorthAToken);
}

bool begins_with(std::span<const int32_t> tokens, const std::vector<int32_t>& prefix) {
  return prefix.size() <= tokens.size() && std::equal(prefix.begin(), prefix.end(), tokens.begin());
}

std::vector<int32_t> cut(std::span<const int32_t> tokens, int64_t from, int64_t to) {
  const auto size = static_cast<int64_t>(tokens.size());
  from = std::clamp<int64_t>(from, 0, size);
  to = std::clamp<int64_t>(to, from, size);
  return {tokens.begin() + from, tokens.begin() + to};
}

bool moves_on(Snapshot::Kind kind) {
  return kind != Snapshot::Kind::branch && kind != Snapshot::Kind::sparse;
}

}  // namespace

const Snapshot* PrefixCache::find(std::span<const int32_t> prompt, int64_t max_tokens) {
  auto best = entries_.end();
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    if (it->n_tokens() > max_tokens) continue;
    if (best != entries_.end() && it->n_tokens() <= best->n_tokens()) continue;
    if (begins_with(prompt, it->snapshot.tokens)) best = it;
  }
  if (best == entries_.end()) return nullptr;
  use(best);
  return &entries_.front().snapshot;
}

int64_t PrefixCache::n_known(std::span<const int32_t> prompt, int64_t max_tokens) const {
  int64_t n = 0;
  for (const Entry& e : entries_)
    if (e.n_tokens() <= max_tokens && e.n_tokens() > n && begins_with(prompt, e.snapshot.tokens))
      n = e.n_tokens();
  return n;
}

const Snapshot* PrefixCache::exactly(std::span<const int32_t> tokens) const {
  const auto at = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) {
    return e.snapshot.tokens.size() == tokens.size() && begins_with(tokens, e.snapshot.tokens);
  });
  return at == entries_.end() ? nullptr : &at->snapshot;
}

std::optional<CacheMiss> PrefixCache::explain(std::span<const int32_t> prompt) const {
  const Entry* closest = nullptr;
  int64_t n_common = 0;
  for (const Entry& e : entries_) {
    const auto& tokens = e.snapshot.tokens;
    const int64_t n =
        std::mismatch(tokens.begin(), tokens.end(), prompt.begin(), prompt.end()).first - tokens.begin();
    // Of those that agree equally long the one that goes on, and so shows the difference.
    if (n < n_common || n == 0 || (n == n_common && closest != nullptr && closest->n_tokens() > n)) continue;
    n_common = n;
    closest = &e;
  }
  if (closest == nullptr || n_common == closest->n_tokens() ||
      n_common == static_cast<int64_t>(prompt.size()))
    return std::nullopt;
  return CacheMiss{.position = static_cast<int32_t>(n_common),
                   .before = cut(prompt, n_common - kTokensExplained, n_common),
                   .known = cut(closest->snapshot.tokens, n_common, n_common + kTokensExplained),
                   .asked = cut(prompt, n_common, n_common + kTokensExplained)};
}

bool PrefixCache::parts_again_after(std::span<const int32_t> beginning) {
  Parting parting{.n_tokens = beginning.size(), .hash = 0xcbf29ce484222325u};  // FNV-1a
  for (const int32_t token : beginning)
    parting.hash = (parting.hash ^ static_cast<uint32_t>(token)) * 0x100000001b3u;
  const auto known = std::find(partings_.begin(), partings_.end(), parting);
  const bool again = known != partings_.end();
  if (again) partings_.erase(known);
  partings_.push_front(parting);
  if (partings_.size() > kMaxPartings) partings_.pop_back();
  return again;
}

void PrefixCache::clear() {
  entries_.clear();
  partings_.clear();
}

void PrefixCache::insert(Snapshot snapshot) {
  Entries added;
  added.push_back(Entry{.snapshot = std::move(snapshot)});
  const Snapshot& news = added.front().snapshot;
  for (auto it = entries_.begin(); it != entries_.end();) {
    const Snapshot& old = it->snapshot;
    const bool superseded = !old.session.empty() && old.session == news.session && old.kind == news.kind &&
                            moves_on(news.kind) && begins_with(news.tokens, old.tokens);
    it = superseded ? erase(it) : std::next(it);
  }
  Entry& entry = added.front();
  for (Entry& e : entries_) {
    if (e.n_tokens() < entry.n_tokens()) {
      if (begins_with(news.tokens, e.snapshot.tokens))
        entry.n_before = std::max(entry.n_before, e.n_tokens());
    } else if (e.n_before < entry.n_tokens() && begins_with(e.snapshot.tokens, news.tokens)) {
      e.n_before = entry.n_tokens();
    }
  }
  entries_.splice(entries_.begin(), added);
  use(entries_.begin());
}

bool PrefixCache::Gain::has(Wanted wanted) const {
  return (n_states > 0 && wanted != Wanted::block) || (n_blocks > 0 && wanted != Wanted::state);
}

PrefixCache::Gain PrefixCache::gain(const Snapshot& snapshot) {
  return {.n_states = snapshot.state && !snapshot.state.shared() ? 1 : 0,
          .n_blocks = std::count_if(snapshot.blocks.begin(), snapshot.blocks.end(),
                                    [](const KvBlock& block) { return !block.shared(); })};
}

double PrefixCache::worth(const Entry& entry, const Gain& gain) const {
  const double n_bytes = static_cast<double>(gain.n_states * state_bytes_ + gain.n_blocks * block_bytes_);
  return entry.age + (work_to_read(entry.n_tokens()) - work_to_read(entry.n_before)) / std::max(1.0, n_bytes);
}

bool PrefixCache::evict(Wanted wanted) {
  if (entries_.empty()) return false;
  auto least = entries_.end();
  // By falling weight: whether it helps, whether a live session needs it, what it is worth. Of equals the one
  // not used for the longest time.
  std::tuple<bool, bool, double> least_rank;
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    const Gain gained = gain(it->snapshot);
    const std::tuple rank{!gained.has(wanted), pinned(*it), worth(*it, gained)};
    if (least != entries_.end() && rank > least_rank) continue;
    least = it;
    least_rank = rank;
  }
  age_ = std::max(age_, std::get<double>(least_rank));
  erase(least);
  ++n_evictions_;
  return true;
}

void PrefixCache::use(Entries::iterator entry) {
  entry->age = age_;
  entry->last_use = ++n_uses_;
  entries_.splice(entries_.begin(), entries_, entry);
}

PrefixCache::Entries::iterator PrefixCache::erase(Entries::iterator entry) {
  for (Entry& e : entries_)
    if (e.n_before == entry->n_tokens() && e.n_tokens() > e.n_before &&
        begins_with(e.snapshot.tokens, entry->snapshot.tokens))
      e.n_before = entry->n_before;
  return entries_.erase(entry);
}

bool PrefixCache::pinned(const Entry& entry) const {
  const std::string& session = entry.snapshot.session;
  if (session.empty() || n_uses_ - entry.last_use >= kUsesOfALiveSession) return false;
  return std::none_of(entries_.begin(), entries_.end(), [&](const Entry& e) {
    return e.snapshot.session == session && e.n_tokens() > entry.n_tokens();
  });
}

}  // namespace lily::engine
