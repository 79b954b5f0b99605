// What the engine remembers of earlier prompts: snapshots. Engine thread only.
//
// A snapshot is the recurrent state after some tokens, with the KV blocks of those tokens. KV can be cut at
// any token, a recurrent state cannot; so a prompt resumes at the longest snapshot that it begins with, and
// what comes after it is computed. Snapshots are taken at the end of a prompt, at the end of a turn, where
// the caller says that later prompts will agree or part (GenerateRequest::n_stable, branches), where prompts
// have parted twice, and now and then inside a long prompt (EngineOptions::state_interval). A snapshot costs
// a hold on a state slot and on blocks that exist anyway: nothing is copied.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "engine/memory_pool.h"
#include "engine/request.h"

namespace lily::engine {

struct Snapshot {
  // The first three move on with a conversation, the others stay where they are.
  enum class Kind : uint8_t { stable, prompt_end, turn_end, branch, sparse };
  Kind kind = Kind::turn_end;
  std::string session;
  std::vector<int32_t> tokens;
  StateHold state;              // after all of them
  std::vector<KvBlock> blocks;  // of their positions; the last one may be filled in part
};

class PrefixCache {
 public:
  // Bytes of a state and of a block (Limits).
  explicit PrefixCache(int64_t state_bytes = 1, int64_t block_bytes = 0)
      : state_bytes_(state_bytes), block_bytes_(block_bytes) {}

  // The longest snapshot of at most max_tokens tokens that the prompt begins with, or nullptr; it counts as
  // used. Valid until the next insert or evict.
  const Snapshot* find(std::span<const int32_t> prompt, int64_t max_tokens);
  // The length of what find() would return; nothing counts as used.
  int64_t n_known(std::span<const int32_t> prompt, int64_t max_tokens) const;
  bool contains(std::span<const int32_t> tokens) const { return exactly(tokens) != nullptr; }
  // The snapshot of these tokens, or nullptr; it does not count as used.
  const Snapshot* exactly(std::span<const int32_t> tokens) const;
  // Nothing where the prompt goes on from all it has in common with what is remembered, or has nothing in
  // common. Against the snapshot that agrees with it longest.
  std::optional<CacheMiss> explain(std::span<const int32_t> prompt) const;
  // True if a prompt has parted before from what was remembered after exactly this beginning: the next one
  // may do so too, and a state there is worth having.
  bool parts_again_after(std::span<const int32_t> beginning);
  // Replaces snapshots of the same session and kind that it goes on from, if the kind moves on. A request of
  // the same session that begins otherwise (a title, an edit) replaces nothing.
  void insert(Snapshot snapshot);
  // Drops the snapshot that saves the least work for each byte it gives back; false if there is none. One
  // that gives back what is wanted, if any does: others hold the state or the blocks of a snapshot too, and
  // its loss would gain nothing.
  bool evict(Wanted wanted = Wanted::state);
  void clear();
  int size() const { return static_cast<int>(entries_.size()); }
  int64_t n_evictions() const { return n_evictions_; }

 private:
  struct Entry {
    Snapshot snapshot;
    int64_t n_before = 0;  // tokens of the longest other snapshot that it begins with
    double age = 0;        // age_ when it was last used
    int64_t last_use = 0;  // n_uses_ then
    int64_t n_tokens() const { return static_cast<int64_t>(snapshot.tokens.size()); }
  };
  using Entries = std::list<Entry>;

  void use(Entries::iterator entry);
  Entries::iterator erase(Entries::iterator entry);
  bool pinned(const Entry& entry) const;
  // Memory that nobody else holds: a state (0 or 1) and blocks.
  struct Gain {
    int64_t n_states = 0, n_blocks = 0;
    bool has(Wanted wanted) const;
  };
  static Gain gain(const Snapshot& snapshot);
  // The work that this snapshot saves beyond the one before it, for each byte of `gain`, and its age.
  double worth(const Entry& entry, const Gain& gain) const;

  const int64_t state_bytes_, block_bytes_;
  Entries entries_;  // most recently used first
  double age_ = 0;
  int64_t n_uses_ = 0, n_evictions_ = 0;

  // Where prompts have parted, newest first. Hashes may collide: a state is kept for nothing then.
  struct Parting {
    size_t n_tokens;
    uint64_t hash;
    bool operator==(const Parting&) const = default;
  };
  std::deque<Parting> partings_;
};

}  // namespace lily::engine
