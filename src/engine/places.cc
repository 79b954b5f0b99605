#include "engine/places.h"

#include <algorithm>

#include "base/error.h"

namespace lily::engine {
namespace {

class VacantStates final : public Vacancies {
 public:
  explicit VacantStates(Places& places) : places_(places) {}
  std::optional<int32_t> take() override { return places_.take_state(); }
  void put_back(int32_t state) noexcept override { places_.free_state(state); }
  void check_integrity(const std::vector<bool>& is_held) const override {
    places_.check_integrity();
    for (int32_t i = 0; i < std::ssize(is_held); ++i)
      LILY_CHECK(places_.is_state(i) == is_held[static_cast<size_t>(i)], "state {}", i);
  }

 private:
  Places& places_;
};

class VacantBlocks final : public Vacancies {
 public:
  explicit VacantBlocks(Places& places) : places_(places) {}
  std::optional<int32_t> take() override { return places_.take_block(); }
  void put_back(int32_t block) noexcept override { places_.free_block(block); }
  void check_integrity(const std::vector<bool>& is_held) const override {
    for (int32_t i = 0; i < std::ssize(is_held); ++i)
      LILY_CHECK(places_.is_block(i) == is_held[static_cast<size_t>(i)], "block {}", i);
  }

 private:
  Places& places_;
};

}  // namespace

Places::Places(int n_places, int blocks_per_place, int n_for_states)
    : blocks_per_place_(blocks_per_place),
      most_with_blocks_(n_places - n_for_states),
      places_(static_cast<size_t>(n_places)),
      first_with_(static_cast<size_t>(blocks_per_place) + 1, kNone),
      vacant_(static_cast<size_t>(n_places) * static_cast<size_t>(blocks_per_place)) {
  LILY_CHECK(n_for_states >= 0 && n_for_states <= n_places && blocks_per_place > 0,
             "{} of {} places of {} blocks for states", n_for_states, n_places, blocks_per_place);
  for (int32_t place = n_places - 1; place >= 0; --place) {
    for (int32_t i = 0; i < blocks_per_place_; ++i)
      vacant(place, i) = place * blocks_per_place_ + blocks_per_place_ - 1 - i;
    link(place, 0);
  }
}

void Places::unlink(int32_t place) noexcept {
  const Place& p = at(place);
  (p.before == kNone ? first_with(p.n_blocks) : at(p.before).next) = p.next;
  if (p.next != kNone) at(p.next).before = p.before;
  n_free_ -= p.n_blocks == 0 ? 1 : 0;
  n_with_blocks_ -= p.n_blocks > 0 ? 1 : 0;
}

void Places::link(int32_t place, int32_t n_blocks) noexcept {
  Place& p = at(place);
  p = {.n_blocks = n_blocks, .before = kNone, .next = first_with(n_blocks)};
  if (p.next != kNone) at(p.next).before = place;
  first_with(n_blocks) = place;
  n_free_ += n_blocks == 0 ? 1 : 0;
  n_with_blocks_ += n_blocks > 0 ? 1 : 0;
}

std::optional<int32_t> Places::take_state() {
  const int32_t place = first_with(0);
  if (place == kNone) return std::nullopt;
  unlink(place);
  at(place).n_blocks = kState;
  return place;
}

void Places::free_state(int32_t state) noexcept {
  LILY_CHECK(is_state(state), "place {} is no state", state);
  link(state, 0);
}

int32_t Places::place_for_block() const {
  for (auto n = static_cast<size_t>(blocks_per_place_) - 1; n > 0; --n)
    if (first_with_[n] != kNone) return first_with_[n];
  return n_with_blocks_ < most_with_blocks_ ? first_with_[0] : kNone;
}

std::optional<int32_t> Places::take_block() {
  const int32_t place = place_for_block();
  if (place == kNone) return std::nullopt;
  const int32_t n_blocks = at(place).n_blocks;
  unlink(place);
  link(place, n_blocks + 1);
  return vacant(place, blocks_per_place_ - n_blocks - 1);
}

void Places::free_block(int32_t block) noexcept {
  const int32_t place = block / blocks_per_place_;
  const int32_t n_blocks = at(place).n_blocks;
  LILY_CHECK(n_blocks > 0, "no block lies in place {}", place);
  unlink(place);
  link(place, n_blocks - 1);
  vacant(place, blocks_per_place_ - n_blocks) = block;
}

bool Places::is_block(int32_t block) const {
  const int32_t place = block / blocks_per_place_;
  const int32_t n_blocks = at(place).n_blocks;
  if (n_blocks == kState) return false;
  const auto begin = vacant_.begin() + std::ptrdiff_t{place} * blocks_per_place_;
  const auto end = begin + (blocks_per_place_ - n_blocks);
  return std::find(begin, end, block) == end;
}

void Places::check_integrity() const {
  int n_states = 0, n_listed = 0;
  for (const Place& p : places_) n_states += p.n_blocks == kState ? 1 : 0;
  for (int32_t n = 0; n <= blocks_per_place_; ++n)
    for (int32_t before = kNone, i = first_with_[static_cast<size_t>(n)]; i != kNone;
         before = i, i = at(i).next) {
      LILY_CHECK(at(i).n_blocks == n && at(i).before == before, "place {} is listed wrongly", i);
      LILY_CHECK(++n_listed <= n_places(), "places with {} blocks are listed in a circle", n);
      for (int32_t k = 0; k < blocks_per_place_ - n; ++k)
        LILY_CHECK(vacant_[static_cast<size_t>(i) * static_cast<size_t>(blocks_per_place_) +
                           static_cast<size_t>(k)] /
                           blocks_per_place_ ==
                       i,
                   "a block of another place is vacant in place {}", i);
    }
  LILY_CHECK(n_states + n_listed == n_places() && n_free_ + n_with_blocks_ == n_listed,
             "{} states and {} others of {} places", n_states, n_listed, n_places());
  LILY_CHECK(n_with_blocks_ <= most_with_blocks_, "blocks lie in {} places, in at most {}", n_with_blocks_,
             most_with_blocks_);
}

std::unique_ptr<Vacancies> Places::states() { return std::make_unique<VacantStates>(*this); }
std::unique_ptr<Vacancies> Places::blocks() { return std::make_unique<VacantBlocks>(*this); }

}  // namespace lily::engine
