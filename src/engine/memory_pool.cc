#include "engine/memory_pool.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/error.h"

namespace lily::engine {
namespace {

std::optional<Places> places_of(const Limits& limits) {
  if (limits.blocks_per_state == 0) return std::nullopt;
  LILY_CHECK(limits.pool_bytes == 0 && limits.n_kv_blocks == limits.n_state_slots * limits.blocks_per_state,
             "{} blocks in {} places of {}", limits.n_kv_blocks, limits.n_state_slots,
             limits.blocks_per_state);
  return std::optional<Places>(std::in_place, limits.n_state_slots, limits.blocks_per_state,
                               limits.n_state_places);
}

}  // namespace

MemoryPool::MemoryPool(Executor& executor)
    : executor_(executor),
      limits_(executor.limits()),
      limit_bytes_(limits_.pool_bytes),
      places_(places_of(limits_)),
      states_(limits_.n_state_slots,
              places_ ? places_->states() : std::make_unique<FreeList>(limits_.n_state_slots)),
      blocks_(limits_.n_kv_blocks,
              places_ ? places_->blocks() : std::make_unique<FreeList>(limits_.n_kv_blocks)) {}

int64_t MemoryPool::pool_bytes() const {
  return places_ ? resident_bytes(places_->n_places(), 0) : limits_.pool_bytes;
}

int64_t MemoryPool::resident_bytes() const {
  if (places_) return resident_bytes(places_->n_places() - places_->n_free(), 0);
  return gives_back() ? resident_bytes(states_.n_resident(), blocks_.n_resident()) : 0;
}

bool MemoryPool::fits(int64_t n_states, int64_t n_blocks) const {
  if (places_)
    return n_states <= limits_.n_state_places &&
           n_blocks <= int64_t{places_->most_with_blocks()} * limits_.blocks_per_state;
  if (n_states > states_.n_total() || n_blocks > blocks_.n_total()) return false;
  return !gives_back() || resident_bytes(n_states, n_blocks) <= limits_.pool_bytes;
}

std::optional<StateHold> MemoryPool::take_state() {
  if (gives_back() && states_.n_kept() == 0 && !make_room(limits_.state_bytes)) return std::nullopt;
  return states_.take();
}

std::optional<KvBlock> MemoryPool::take_block() {
  if (gives_back() && blocks_.n_kept() == 0 && !make_room(limits_.block_bytes)) return std::nullopt;
  return blocks_.take();
}

// A state leaves a place; blocks leave one only if they are all that lie in it.
Wanted MemoryPool::wanted_for_state() const {
  return places_ || states_.n_free() == 0 ? Wanted::state : Wanted::memory;
}

Wanted MemoryPool::wanted_for_block() const {
  const bool is_full =
      places_ ? places_->n_with_blocks() == places_->most_with_blocks() : blocks_.n_free() == 0;
  return is_full ? Wanted::block : Wanted::memory;
}

bool MemoryPool::make_room(int64_t n_bytes) {
  while (resident_bytes() + n_bytes > limit_bytes_)
    if (!give_back_one()) return false;
  return true;
}

bool MemoryPool::shrink_to(int64_t n_bytes) {
  limit_bytes_ = std::min(limits_.pool_bytes, std::max<int64_t>(0, n_bytes));
  return make_room(0);
}

bool MemoryPool::give_back_one() {
  if (const auto slot = states_.give_back()) {
    executor_.give_back_state(*slot);
    return true;
  }
  const auto block = blocks_.give_back();
  if (block) executor_.give_back_kv(*block);
  return block.has_value();
}

}  // namespace lily::engine
