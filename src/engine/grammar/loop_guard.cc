#include "engine/grammar/loop_guard.h"

#include <algorithm>

#include "base/error.h"

namespace lily::engine::grammar {

LoopGuard::LoopGuard(const LoopLimits& limits) : limits_(limits) {
  if (limits.min_period < 1 || limits.max_period < limits.min_period || limits.max_period > 4096 ||
      limits.min_repeats < 2)
    fail(Fault::user,
         "loop guard: periods {} to {}, {} repeats; periods must rise from 1 to at most 4096, repeats be 2 "
         "or more",
         limits.min_period, limits.max_period, limits.min_repeats);
  reset();
}

void LoopGuard::reset() {
  latest_.assign(static_cast<size_t>(limits_.max_period), -1);
  n_equal_.assign(static_cast<size_t>(limits_.max_period) + 1, 0);
  n_tokens_ = 0;
}

bool LoopGuard::push(int32_t token) {
  if (!limits_.enabled) return false;
  const auto size = static_cast<int64_t>(limits_.max_period);
  bool found = false;
  for (int p = limits_.min_period; p <= limits_.max_period; ++p) {
    int32_t& n = n_equal_[static_cast<size_t>(p)];
    const bool equal = n_tokens_ >= p && latest_[static_cast<size_t>((n_tokens_ - p) % size)] == token;
    n = equal ? n + 1 : 0;
    found |= n >= p * (limits_.min_repeats - 1);
  }
  latest_[static_cast<size_t>(n_tokens_ % size)] = token;
  ++n_tokens_;
  return found;
}

}  // namespace lily::engine::grammar
