#include "engine/event_channel.h"

#include <utility>

namespace lily::engine {

bool EventChannel::push(Event event) {
  {
    const std::lock_guard lock(mutex_);
    if (end_) return true;
    if (std::holds_alternative<PromptProgress>(event) && !events_.empty() &&
        std::holds_alternative<PromptProgress>(events_.back())) {
      events_.back() = std::move(event);
      return true;
    }
    if (auto* const finished = std::get_if<Finished>(&event)) {
      end_ = std::move(*finished);
    } else {
      if (events_.size() >= capacity_) return false;
      events_.push_back(std::move(event));
    }
  }
  changed_.notify_one();
  return true;
}

std::optional<Event> EventChannel::next(std::optional<std::chrono::steady_clock::time_point> deadline) {
  std::unique_lock lock(mutex_);
  const auto ready = [&] { return end_ || !events_.empty(); };
  if (!deadline) changed_.wait(lock, ready);
  else if (!changed_.wait_until(lock, *deadline, ready)) return std::nullopt;
  if (done_) return std::nullopt;
  if (events_.empty()) {
    done_ = true;
    return std::move(*end_);
  }
  Event event = std::move(events_.front());
  events_.pop_front();
  return event;
}

bool EventChannel::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

}  // namespace lily::engine
