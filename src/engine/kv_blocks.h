// Ownership of KV blocks. Engine thread only.
//
// A block has any number of readers and at most one writer. Readers rely on its first positions only: a
// sequence that goes on writing behind what the prefix cache remembers does not disturb it. A sequence that
// resumes in the middle of a block may become its writer if nobody else is and nobody relies on what it would
// overwrite; otherwise it needs a copy.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/vacancies.h"

namespace lily::engine {

class KvBlockPool;

// One hold on a block; moves, does not copy.
class KvBlock {
 public:
  KvBlock() = default;
  KvBlock(KvBlock&& other) noexcept;
  KvBlock& operator=(KvBlock&& other) noexcept;
  ~KvBlock() { reset(); }

  int32_t id() const;
  bool writable() const { return writable_; }
  bool shared() const;  // with other holds
  // A reader that relies on the first n_used positions.
  KvBlock share(int n_used) const;
  // Makes this hold the writer of the positions from n_used on; false if that would disturb others.
  bool make_writable(int n_used);
  void reset();

 private:
  friend class KvBlockPool;
  KvBlock(KvBlockPool* pool, int32_t id, bool writable) : pool_(pool), id_(id), writable_(writable) {}

  KvBlockPool* pool_ = nullptr;
  int32_t id_ = -1;
  bool writable_ = false;
};

// Outlives its blocks.
class KvBlockPool {
 public:
  explicit KvBlockPool(int n) : KvBlockPool(n, std::make_unique<FreeList>(n)) {}
  KvBlockPool(int n, std::unique_ptr<Vacancies> vacant);
  ~KvBlockPool();
  KvBlockPool(const KvBlockPool&) = delete;
  KvBlockPool& operator=(const KvBlockPool&) = delete;

  // A block nobody else holds, as its writer; nothing if none is to be had.
  std::optional<KvBlock> take();
  int n_free() const { return n_total() - n_held_; }  // that nobody holds
  int n_total() const { return static_cast<int>(blocks_.size()); }
  // As in Vacancies.
  int n_kept() const { return vacant_->n_kept(); }
  int n_resident() const { return n_held_ + n_kept(); }
  std::optional<int32_t> give_back() { return vacant_->give_back(); }
  void check_integrity() const;

 private:
  friend class KvBlock;
  struct State {
    int32_t holds = 0;
    int32_t relied = 0;  // positions that readers rely on, or did since the block was last free
    bool has_writer = false;
  };
  State& state(int32_t id) { return blocks_[static_cast<size_t>(id)]; }

  std::vector<State> blocks_;
  int n_held_ = 0;
  std::unique_ptr<Vacancies> vacant_;
};

}  // namespace lily::engine
