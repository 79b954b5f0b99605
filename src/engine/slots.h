// Ownership of numbered places on the device: state slots, which a running sequence and the prefix cache may
// hold at the same time, and token slots. Engine thread only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"

namespace lily::engine {

template <typename Id>
class SlotPool;

// One hold on a slot; the slot is free again when the last hold is gone. Moves, does not copy.
template <typename Id>
class Slot {
 public:
  Slot() = default;
  Slot(Slot&& other) noexcept : pool_(std::exchange(other.pool_, nullptr)), index_(other.index_) {}
  Slot& operator=(Slot&& other) noexcept {
    if (this == &other) return *this;
    reset();
    pool_ = std::exchange(other.pool_, nullptr);
    index_ = other.index_;
    return *this;
  }
  ~Slot() { reset(); }

  explicit operator bool() const { return pool_ != nullptr; }
  Id id() const {
    LILY_CHECK(pool_ != nullptr, "an empty slot");
    return Id{index_};
  }
  Slot share() const;
  bool shared() const;  // with other holds
  void reset();

 private:
  friend class SlotPool<Id>;
  Slot(SlotPool<Id>* pool, int32_t index) : pool_(pool), index_(index) {}

  SlotPool<Id>* pool_ = nullptr;
  int32_t index_ = 0;
};

// Outlives its slots.
template <typename Id>
class SlotPool {
 public:
  explicit SlotPool(int n) : holds_(static_cast<size_t>(n), 0) {
    for (int32_t i = n - 1; i >= 0; --i) free_.push_back(i);
  }
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;
  ~SlotPool() { LILY_CHECK(free_.size() == holds_.size(), "{} slots still held", n_total() - n_free()); }

  // Nothing if none is free.
  std::optional<Slot<Id>> take() {
    if (free_.empty()) return std::nullopt;
    const int32_t index = free_.back();
    free_.pop_back();
    n_kept_ = std::max(0, n_kept_ - 1);
    holds_[static_cast<size_t>(index)] = 1;
    return Slot<Id>(this, index);
  }
  int n_free() const { return static_cast<int>(free_.size()); }
  int n_total() const { return static_cast<int>(holds_.size()); }
  // Free ones that were in use since their memory was given back last. They are handed out first.
  int n_kept() const { return n_kept_; }
  int n_resident() const { return n_total() - n_free() + n_kept_; }
  // One of these whose memory is given back now: the one free for the longest time.
  std::optional<Id> give_back() {
    if (n_kept_ == 0) return std::nullopt;
    return Id{free_[free_.size() - static_cast<size_t>(n_kept_--)]};
  }

  // Every slot is either free once or held.
  void check_integrity() const {
    std::vector<int> seen(holds_.size(), 0);
    for (const int32_t index : free_) ++seen[static_cast<size_t>(index)];
    for (size_t i = 0; i < holds_.size(); ++i)
      LILY_CHECK(seen[i] == (holds_[i] == 0 ? 1 : 0), "slot {}: {} holds, {} times free", i, holds_[i],
                 seen[i]);
  }

 private:
  friend class Slot<Id>;
  std::vector<int32_t> holds_;
  std::vector<int32_t> free_;  // the last n_kept_ are resident
  int n_kept_ = 0;
};

template <typename Id>
Slot<Id> Slot<Id>::share() const {
  LILY_CHECK(pool_ != nullptr, "an empty slot");
  ++pool_->holds_[static_cast<size_t>(index_)];
  return Slot(pool_, index_);
}

template <typename Id>
bool Slot<Id>::shared() const {
  return pool_ != nullptr && pool_->holds_[static_cast<size_t>(index_)] > 1;
}

template <typename Id>
void Slot<Id>::reset() {
  if (pool_ == nullptr) return;
  SlotPool<Id>* const pool = std::exchange(pool_, nullptr);
  if (--pool->holds_[static_cast<size_t>(index_)] > 0) return;
  pool->free_.push_back(index_);
  ++pool->n_kept_;
}

}  // namespace lily::engine
