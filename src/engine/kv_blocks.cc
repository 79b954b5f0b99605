#include "engine/kv_blocks.h"

#include <algorithm>
#include <utility>

#include "backend/backend.h"
#include "base/error.h"

namespace lily::engine {

KvBlock::KvBlock(KvBlock&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)),
      id_(other.id_),
      writable_(std::exchange(other.writable_, false)) {}

KvBlock& KvBlock::operator=(KvBlock&& other) noexcept {
  if (this == &other) return *this;
  reset();
  pool_ = std::exchange(other.pool_, nullptr);
  id_ = other.id_;
  writable_ = std::exchange(other.writable_, false);
  return *this;
}

int32_t KvBlock::id() const {
  LILY_CHECK(pool_ != nullptr, "an empty hold");
  return id_;
}

KvBlock KvBlock::share(int n_used) const {
  LILY_CHECK(pool_ != nullptr && n_used > 0 && n_used <= backend::kKvBlockTokens, "n_used {}", n_used);
  KvBlockPool::State& state = pool_->state(id_);
  ++state.holds;
  state.relied = std::max(state.relied, n_used);
  return {pool_, id_, false};
}

bool KvBlock::make_writable(int n_used) {
  LILY_CHECK(pool_ != nullptr);
  if (writable_) return true;
  KvBlockPool::State& state = pool_->state(id_);
  if (state.has_writer || state.relied > n_used) return false;
  state.has_writer = writable_ = true;
  return true;
}

bool KvBlock::shared() const { return pool_ != nullptr && pool_->state(id_).holds > 1; }

void KvBlock::reset() {
  if (pool_ == nullptr) return;
  KvBlockPool* const pool = std::exchange(pool_, nullptr);
  KvBlockPool::State& state = pool->state(id_);
  if (std::exchange(writable_, false)) state.has_writer = false;
  if (--state.holds > 0) return;
  state = {};
  pool->free_.push_back(id_);
  ++pool->n_kept_;
}

KvBlockPool::KvBlockPool(int n) : blocks_(static_cast<size_t>(n)) {
  for (int32_t i = n - 1; i >= 0; --i) free_.push_back(i);
}

KvBlockPool::~KvBlockPool() {
  LILY_CHECK(n_free() == n_total(), "{} blocks still held", n_total() - n_free());
}

std::optional<KvBlock> KvBlockPool::take() {
  if (free_.empty()) return std::nullopt;
  const int32_t id = free_.back();
  free_.pop_back();
  n_kept_ = std::max(0, n_kept_ - 1);
  state(id) = {.holds = 1, .relied = 0, .has_writer = true};
  return KvBlock(this, id, true);
}

std::optional<int32_t> KvBlockPool::give_back() {
  if (n_kept_ == 0) return std::nullopt;
  return free_[free_.size() - static_cast<size_t>(n_kept_--)];
}

void KvBlockPool::check_integrity() const {
  std::vector<int> seen(blocks_.size(), 0);
  for (const int32_t id : free_) ++seen[static_cast<size_t>(id)];
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const State& s = blocks_[i];
    LILY_CHECK(seen[i] == (s.holds == 0 ? 1 : 0), "block {}: {} holds, {} times free", i, s.holds, seen[i]);
    LILY_CHECK(s.holds > 0 || !s.has_writer, "block {} is free and has a writer", i);
  }
}

}  // namespace lily::engine
