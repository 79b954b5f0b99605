// Which of a pool's numbers nobody holds: a pool counts holds, and asks this which number comes next. Engine
// thread only. Nothing here allocates once it is made, so that a hold can be given up anywhere.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/error.h"

namespace lily::engine {

class Vacancies {
 public:
  virtual ~Vacancies() = default;
  // Nothing if none is to be had.
  virtual std::optional<int32_t> take() = 0;
  // One that was taken.
  virtual void put_back(int32_t index) noexcept = 0;
  // Every number is either held or vacant once.
  virtual void check_integrity(const std::vector<bool>& is_held) const = 0;

  // Vacant ones that were in use since their memory was given back last. They are taken first.
  virtual int n_kept() const { return 0; }
  // One of these whose memory is given back now: the one vacant for the longest time.
  virtual std::optional<int32_t> give_back() { return std::nullopt; }
};

// Numbers that have nothing to do with those of another pool.
class FreeList final : public Vacancies {
 public:
  explicit FreeList(int n) {
    for (int32_t i = n - 1; i >= 0; --i) free_.push_back(i);
  }

  std::optional<int32_t> take() override {
    if (free_.empty()) return std::nullopt;
    const int32_t index = free_.back();
    free_.pop_back();
    n_kept_ = std::max(0, n_kept_ - 1);
    return index;
  }
  void put_back(int32_t index) noexcept override {
    free_.push_back(index);
    ++n_kept_;
  }
  void check_integrity(const std::vector<bool>& is_held) const override {
    std::vector<int> n_free(is_held.size(), 0);
    for (const int32_t index : free_) ++n_free[static_cast<size_t>(index)];
    for (size_t i = 0; i < is_held.size(); ++i)
      LILY_CHECK(n_free[i] == (is_held[i] ? 0 : 1), "{} is {}, and {} times free", i,
                 is_held[i] ? "held" : "not held", n_free[i]);
  }

  int n_kept() const override { return n_kept_; }
  std::optional<int32_t> give_back() override {
    if (n_kept_ == 0) return std::nullopt;
    return free_[free_.size() - static_cast<size_t>(n_kept_--)];
  }

 private:
  std::vector<int32_t> free_;  // the last n_kept_ are resident
  int n_kept_ = 0;
};

}  // namespace lily::engine
