// The bounded channel between the engine's thread, which never waits for it, and one reader.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>

#include "engine/request.h"

namespace lily::engine {

// Owned by both ends: a reader may outlive the engine, and the engine may still be at work when a reader has
// left.
class EventChannel {
 public:
  explicit EventChannel(int capacity) : capacity_(static_cast<size_t>(capacity)) {}

  // Engine's end. False if the reader has left `capacity` events unread: the event is dropped. A
  // PromptProgress replaces an unread one, and Finished always finds room.
  bool push(Event event);
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }

  // Reader's end; nothing if none came before the deadline, or after Finished.
  std::optional<Event> next(std::optional<std::chrono::steady_clock::time_point> deadline);
  bool done() const;
  void cancel() { cancelled_.store(true, std::memory_order_relaxed); }

 private:
  const size_t capacity_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Event> events_;
  // Has a place of its own, so that it arrives where the memory for another event is not to be had. What
  // comes later is dropped.
  std::optional<Finished> end_;
  bool done_ = false;  // Finished has been read
  std::atomic<bool> cancelled_{false};
};

}  // namespace lily::engine
