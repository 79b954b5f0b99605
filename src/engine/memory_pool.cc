#include "engine/memory_pool.h"

namespace lily::engine {

MemoryPool::MemoryPool(Executor& executor)
    : executor_(executor),
      state_bytes_(executor.limits().state_bytes),
      block_bytes_(executor.limits().block_bytes),
      pool_bytes_(executor.limits().pool_bytes),
      limit_bytes_(pool_bytes_),
      states_(executor.limits().n_state_slots),
      blocks_(executor.limits().n_kv_blocks) {}

int64_t MemoryPool::resident_bytes() const {
  return states_.n_resident() * state_bytes_ + blocks_.n_resident() * block_bytes_;
}

bool MemoryPool::fits(int64_t n_states, int64_t n_blocks) const {
  if (n_states > states_.n_total() || n_blocks > blocks_.n_total()) return false;
  return !gives_back() || n_states * state_bytes_ + n_blocks * block_bytes_ <= pool_bytes_;
}

std::optional<StateHold> MemoryPool::take_state() {
  if (gives_back() && states_.n_kept() == 0 && !make_room(state_bytes_)) return std::nullopt;
  return states_.take();
}

std::optional<KvBlock> MemoryPool::take_block() {
  if (gives_back() && blocks_.n_kept() == 0 && !make_room(block_bytes_)) return std::nullopt;
  return blocks_.take();
}

bool MemoryPool::make_room(int64_t n_bytes) {
  while (resident_bytes() + n_bytes > limit_bytes_)
    if (!give_back_one()) return false;
  return true;
}

bool MemoryPool::shrink_to(int64_t n_bytes) {
  limit_bytes_ = std::min(pool_bytes_, std::max<int64_t>(0, n_bytes));
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
