// Moves snapshots between the device and the disk cache. Engine thread only.
//
// Saving: what the prefix cache takes up is noted, and copied once it has been kept for
// DiskCacheOptions::save_after, a piece at a time between two steps; most snapshots have given way to the
// next turn's by then. While a snapshot is copied its slot and blocks are held; where memory runs short it is
// given up.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <optional>
#include <vector>

#include "engine/disk_cache.h"
#include "engine/executor.h"
#include "engine/prefix_cache.h"

namespace lily::engine {

class SnapshotSaver {
 public:
  using Clock = std::chrono::steady_clock;

  SnapshotSaver(Executor& executor, DiskCache& disk);

  // A snapshot that the prefix cache has taken up.
  void note(const Snapshot& snapshot);
  // Something is due. A machine that is busy is interrupted only for what has been kept ever so long.
  bool is_due(Clock::time_point now, bool busy) const;
  // When to ask again; nothing: when something has been noted.
  std::optional<Clock::duration> next_due(Clock::time_point now) const;
  // Copies one piece of what is due. No step may be in flight. False if the writer has no room.
  bool advance(const PrefixCache& cache);
  // Everything that is noted, now: the engine is about to end.
  void save_all(const PrefixCache& cache);
  // Lets go of the snapshot that is being copied; false if there is none.
  bool give_up();
  void forget_all();
  bool is_copying() const { return copy_.has_value(); }

 private:
  struct Noted {
    SessionKind kind;
    std::vector<int32_t> tokens;
    Clock::time_point since;
  };
  struct Copy {
    SessionHeader header;  // moved away when the writer has it: only the numbers below count then
    StateHold state;
    std::vector<KvBlock> blocks;
    int n_pieces = 0, n_state_pieces = 0;
    int next = 0;
  };

  bool begin(const PrefixCache& cache);
  void copy_piece();

  Executor& executor_;
  DiskCache& disk_;
  const SavedLayout layout_;
  std::list<Noted> noted_;  // the oldest first
  std::optional<Copy> copy_;
};

// Brings a saved session into a state slot and blocks that `take_*` provide. Throws Error if it is damaged or
// not of this layout. No step may be in flight. What is returned holds readers only.
Snapshot restore(SessionReader& reader, Executor& executor, const std::function<StateHold()>& take_state,
                 const std::function<KvBlock()>& take_block);
// Copies a snapshot out in one go.
void write_snapshot(const Snapshot& snapshot, Executor& executor, SessionWriter& writer);
// The header of a snapshot's file, without an identity.
SessionHeader header_of(const Snapshot& snapshot, const SavedLayout& layout);

}  // namespace lily::engine
