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
  --pool->n_held_;
  pool->vacant_->put_back(id_);
}

KvBlockPool::KvBlockPool(int n, std::unique_ptr<Vacancies> vacant)
    : blocks_(static_cast<size_t>(n)), vacant_(std::move(vacant)) {}

KvBlockPool::~KvBlockPool() { LILY_CHECK(n_held_ == 0, "{} blocks still held", n_held_); }

std::optional<KvBlock> KvBlockPool::take() {
  const std::optional<int32_t> id = vacant_->take();
  if (!id) return std::nullopt;
  state(*id) = {.holds = 1, .relied = 0, .has_writer = true};
  ++n_held_;
  return KvBlock(this, *id, true);
}

void KvBlockPool::check_integrity() const {
  std::vector<bool> is_held;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    LILY_CHECK(blocks_[i].holds > 0 || !blocks_[i].has_writer, "block {} is free and has a writer", i);
    is_held.push_back(blocks_[i].holds > 0);
  }
  LILY_CHECK(std::count(is_held.begin(), is_held.end(), true) == n_held_, "{} blocks held", n_held_);
  vacant_->check_integrity(is_held);
}

}  // namespace lily::engine
