// State slots and KV blocks out of one budget of bytes. Engine thread only.
//
// Where the device gives memory back (Limits::pool_bytes), there are more slots and more blocks than the
// budget holds: what one kind does not use, the other may. Counted is what is resident: what somebody holds,
// and what is free but was not given back yet. Where states and blocks share places
// (Limits::blocks_per_state), the places are the budget, and either kind may have them (places.h). Elsewhere
// each kind has places of its own, and the counts are the budget.
#pragma once

#include <cstdint>
#include <optional>

#include "engine/executor.h"
#include "engine/kv_blocks.h"
#include "engine/places.h"
#include "engine/slots.h"

namespace lily::engine {

using StateHold = Slot<backend::StateSlot>;

// What has to be given up for one more of something: a state, a block, or whatever has memory.
enum class Wanted : uint8_t { state, block, memory };

// Outlives what it hands out.
class MemoryPool {
 public:
  explicit MemoryPool(Executor& executor);

  // Nothing if all are held, or if the budget is used up by what is held.
  std::optional<StateHold> take_state();
  std::optional<KvBlock> take_block();
  // After these have found nothing. Once enough of it is given up, there is one.
  Wanted wanted_for_state() const;
  Wanted wanted_for_block() const;

  // So many can be held at the same time, if nobody holds others: the last of them is to be had too, whatever
  // was taken and given up before.
  bool fits(int64_t n_states, int64_t n_blocks) const;

  bool gives_back() const { return limits_.pool_bytes > 0; }
  // What is used of pool_bytes(); 0 where each kind has places of its own.
  int64_t resident_bytes() const;
  int64_t pool_bytes() const;
  // Lowers the budget, and gives back free memory until it is kept or none is left; false in that case. This
  // and what follows is for devices that give memory back.
  bool shrink_to(int64_t n_bytes);
  bool is_shrunk() const { return limit_bytes_ < limits_.pool_bytes; }
  void grow_back() { limit_bytes_ = limits_.pool_bytes; }

  const SlotPool<backend::StateSlot>& states() const { return states_; }
  const KvBlockPool& blocks() const { return blocks_; }

 private:
  int64_t resident_bytes(int64_t n_states, int64_t n_blocks) const {
    return n_states * limits_.state_bytes + n_blocks * limits_.block_bytes;
  }
  bool make_room(int64_t n_bytes);
  bool give_back_one();

  Executor& executor_;
  const Limits limits_;
  int64_t limit_bytes_;
  std::optional<Places> places_;  // outlives the pools
  SlotPool<backend::StateSlot> states_;
  KvBlockPool blocks_;
};

}  // namespace lily::engine
