#include "engine/request_queue.h"

#include <algorithm>
#include <utility>

namespace lily::engine {

const Pending* RequestQueue::next(const std::function<int64_t(const GenerateRequest&)>& work_of) {
  if (waiting_.empty()) return nullptr;
  for (Waiting& w : waiting_)
    if (!w.work) w.work = work_of(w.pending.request);
  const auto shortest = std::min_element(waiting_.begin(), waiting_.end(),
                                         [](const Waiting& a, const Waiting& b) { return a.work < b.work; });
  next_ = oldest_is_next_ ? 0 : static_cast<size_t>(shortest - waiting_.begin());
  return &waiting_[next_].pending;
}

Pending RequestQueue::take_next() {
  const auto at = waiting_.begin() + static_cast<int64_t>(next_);
  oldest_is_next_ = !oldest_is_next_;
  Pending out = std::move(at->pending);
  waiting_.erase(at);
  return out;
}

void RequestQueue::remove_if(const std::function<bool(const Pending&)>& condition) {
  std::erase_if(waiting_, [&](const Waiting& w) { return condition(w.pending); });
}

}  // namespace lily::engine
