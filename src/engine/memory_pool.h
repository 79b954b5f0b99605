// State slots and KV blocks out of one budget of bytes. Engine thread only.
//
// Where the device gives memory back (Limits::pool_bytes), there are more slots and more blocks than the
// budget holds: what one kind does not use, the other may. Counted is what is resident: what somebody holds,
// and what is free but was not given back yet. Elsewhere each has its own place, and the counts are the
// budget.
#pragma once

#include <cstdint>
#include <optional>

#include "engine/executor.h"
#include "engine/kv_blocks.h"
#include "engine/slots.h"

namespace lily::engine {

using StateHold = Slot<backend::StateSlot>;

// Outlives what it hands out.
class MemoryPool {
 public:
  explicit MemoryPool(Executor& executor);

  // Nothing if all are held, or if the budget is used up by what is held.
  std::optional<StateHold> take_state();
  std::optional<KvBlock> take_block();
  bool all_states_held() const { return states_.n_free() == 0; }
  bool all_blocks_held() const { return blocks_.n_free() == 0; }

  // So many can be held at the same time, if nobody holds others.
  bool fits(int64_t n_states, int64_t n_blocks) const;

  bool gives_back() const { return pool_bytes_ > 0; }
  int64_t resident_bytes() const;
  // Lowers the budget, and gives back free memory until it is kept or none is left; false in that case.
  bool shrink_to(int64_t n_bytes);
  bool is_shrunk() const { return limit_bytes_ < pool_bytes_; }
  void grow_back() { limit_bytes_ = pool_bytes_; }

  const SlotPool<backend::StateSlot>& states() const { return states_; }
  const KvBlockPool& blocks() const { return blocks_; }
  int64_t pool_bytes() const { return pool_bytes_; }

 private:
  bool make_room(int64_t n_bytes);
  bool give_back_one();

  Executor& executor_;
  const int64_t state_bytes_, block_bytes_, pool_bytes_;
  int64_t limit_bytes_;
  SlotPool<backend::StateSlot> states_;
  KvBlockPool blocks_;
};

}  // namespace lily::engine
