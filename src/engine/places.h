// Memory that states and KV blocks share on devices which cannot give any back: places, each of which is
// free, is a state, or holds up to blocks_per_place blocks. State s is place s; blocks s * n .. s * n + n - 1
// lie in it. Engine thread only; nothing here allocates once it is made.
//
// Blocks cannot be moved, so those of a few sequences may come to lie in every place, one in each. That no
// state is missing then, some places are for states alone: not these or those, but so many that blocks do not
// lie in. Whoever may hold at most so many states at the same time, and at most as many blocks as the other
// places have, finds room for each of them, wherever the blocks lie: all else can be given up.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/vacancies.h"

namespace lily::engine {

class Places {
 public:
  // Blocks lie in at most n_places - n_for_states places at the same time.
  Places(int n_places, int blocks_per_place, int n_for_states);

  std::optional<int32_t> take_state();
  void free_state(int32_t state) noexcept;
  // In the place with the fewest vacancies that has any, so that others come free; else in a free place.
  std::optional<int32_t> take_block();
  void free_block(int32_t block) noexcept;

  int n_places() const { return static_cast<int>(places_.size()); }
  int n_free() const { return n_free_; }
  int blocks_per_place() const { return blocks_per_place_; }
  // Places in which blocks lie, and how many may be at most.
  int n_with_blocks() const { return n_with_blocks_; }
  int most_with_blocks() const { return most_with_blocks_; }

  bool is_state(int32_t state) const { return at(state).n_blocks == kState; }
  bool is_block(int32_t block) const;
  void check_integrity() const;

  // For the pools that count the holds; outlived by this.
  std::unique_ptr<Vacancies> states();
  std::unique_ptr<Vacancies> blocks();

 private:
  static constexpr int32_t kNone = -1, kState = -1;
  struct Place {
    int32_t n_blocks = 0;                  // that are taken; kState: it is a state
    int32_t before = kNone, next = kNone;  // with as many blocks
  };
  Place& at(int32_t place) { return places_[static_cast<size_t>(place)]; }
  const Place& at(int32_t place) const { return places_[static_cast<size_t>(place)]; }
  int32_t& first_with(int32_t n_blocks) { return first_with_[static_cast<size_t>(n_blocks)]; }
  // The i-th vacant block of a place: those beyond its number of vacancies are taken.
  int32_t& vacant(int32_t place, int32_t i) {
    return vacant_[static_cast<size_t>(place) * static_cast<size_t>(blocks_per_place_) +
                   static_cast<size_t>(i)];
  }
  void unlink(int32_t place) noexcept;
  void link(int32_t place, int32_t n_blocks) noexcept;
  int32_t place_for_block() const;

  const int32_t blocks_per_place_;
  const int most_with_blocks_;
  int n_free_ = 0, n_with_blocks_ = 0;
  std::vector<Place> places_;
  std::vector<int32_t> first_with_;  // [blocks_per_place + 1] a place with so many blocks; states are in none
  std::vector<int32_t> vacant_;      // [n_places, blocks_per_place]
};

}  // namespace lily::engine
