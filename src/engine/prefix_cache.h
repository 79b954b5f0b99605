// What the engine remembers of earlier prompts: snapshots. Engine thread only.
//
// A snapshot is the recurrent state after some tokens, with the KV blocks of those tokens. KV can be cut at
// any token, a recurrent state cannot; so a prompt resumes at the longest snapshot that it begins with, and
// what comes after it is computed. Snapshots are taken at the end of a prompt, at the end of a turn and where
// the caller says that later prompts will agree (GenerateRequest::n_stable). A snapshot costs a hold on a
// state slot and on blocks that exist anyway: nothing is copied.
#pragma once

#include <cstdint>
#include <list>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "engine/kv_blocks.h"
#include "engine/slots.h"

namespace lily::engine {

using StateHold = Slot<backend::StateSlot>;

struct Snapshot {
  enum class Kind : uint8_t { stable, prompt_end, turn_end };
  Kind kind = Kind::turn_end;
  std::string session;
  std::vector<int32_t> tokens;
  StateHold state;              // after all of them
  std::vector<KvBlock> blocks;  // of their positions; the last one may be filled in part
};

class PrefixCache {
 public:
  // The longest snapshot of at most max_tokens tokens that the prompt begins with, or nullptr; it counts as
  // used. Valid until the next insert or evict.
  const Snapshot* find(std::span<const int32_t> prompt, int64_t max_tokens);
  bool contains(std::span<const int32_t> tokens) const;
  // Replaces a snapshot of the same session and kind.
  void insert(Snapshot snapshot);
  // Drops the snapshot that has not been used for the longest time; false if there is none.
  bool evict();
  void clear() { snapshots_.clear(); }
  int size() const { return static_cast<int>(snapshots_.size()); }

 private:
  std::list<Snapshot> snapshots_;  // most recently used first
};

}  // namespace lily::engine
