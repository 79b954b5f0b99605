// Notices a text that repeats itself exactly.
#pragma once

#include <cstdint>
#include <vector>

namespace lily::engine::grammar {

// A cycle of min_period to max_period tokens that stands min_repeats times in a row. A shorter cycle is found
// as a multiple of itself.
struct LoopLimits {
  bool enabled = true;
  int min_period = 4, max_period = 64;
  int min_repeats = 8;
};

class LoopGuard {
 public:
  // Throws Error(Fault::user) for limits that make no sense.
  explicit LoopGuard(const LoopLimits& limits);

  // True if the text now ends in such a loop. A few nanoseconds for each period.
  bool push(int32_t token);
  void reset();

 private:
  LoopLimits limits_;
  std::vector<int32_t> latest_;   // a ring of max_period tokens
  std::vector<int32_t> n_equal_;  // by period: tokens in a row that equal the one a period before
  int64_t n_tokens_ = 0;
};

}  // namespace lily::engine::grammar
