// Ownership of numbered places on the device: state slots, which a running sequence and the prefix cache may
// hold at the same time, and token slots. Engine thread only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "engine/vacancies.h"

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
  explicit SlotPool(int n) : SlotPool(n, std::make_unique<FreeList>(n)) {}
  SlotPool(int n, std::unique_ptr<Vacancies> vacant)
      : holds_(static_cast<size_t>(n), 0), vacant_(std::move(vacant)) {}
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;
  ~SlotPool() { LILY_CHECK(n_held_ == 0, "{} slots still held", n_held_); }

  // Nothing if none is to be had.
  std::optional<Slot<Id>> take() {
    const std::optional<int32_t> index = vacant_->take();
    if (!index) return std::nullopt;
    holds_[static_cast<size_t>(*index)] = 1;
    ++n_held_;
    return Slot<Id>(this, *index);
  }
  int n_free() const { return n_total() - n_held_; }  // that nobody holds
  int n_total() const { return static_cast<int>(holds_.size()); }
  // As in Vacancies.
  int n_kept() const { return vacant_->n_kept(); }
  int n_resident() const { return n_held_ + n_kept(); }
  std::optional<Id> give_back() {
    const std::optional<int32_t> index = vacant_->give_back();
    return index ? std::optional(Id{*index}) : std::nullopt;
  }

  void check_integrity() const {
    std::vector<bool> is_held(holds_.size());
    std::transform(holds_.begin(), holds_.end(), is_held.begin(), [](int32_t n) { return n > 0; });
    LILY_CHECK(std::count(is_held.begin(), is_held.end(), true) == n_held_, "{} slots held", n_held_);
    vacant_->check_integrity(is_held);
  }

 private:
  friend class Slot<Id>;
  std::vector<int32_t> holds_;
  int n_held_ = 0;
  std::unique_ptr<Vacancies> vacant_;
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
  --pool->n_held_;
  pool->vacant_->put_back(index_);
}

}  // namespace lily::engine
