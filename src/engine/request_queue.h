// Requests that wait to be taken up, and the order in which they are.
//
// In turn the shortest one and the one that has waited longest are taken up. So a question waits for about
// one of the documents before it, and not for all; and a document, however many questions come, waits for at
// most twice as many requests as were there before it.
//
// No threads here.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <utility>

#include "engine/sequence.h"

namespace lily::engine {

class RequestQueue {
 public:
  int size() const { return static_cast<int>(waiting_.size()); }
  void push(Pending pending) { waiting_.push_back({std::move(pending), {}}); }

  // The next one, null if none waits; valid until the queue changes. `work_of` gives the tokens of a request
  // that have to be computed, and is asked once for each.
  const Pending* next(const std::function<int64_t(const GenerateRequest&)>& work_of);
  // Takes up what next() returned.
  Pending take_next();
  // Removes those for which this is true.
  void remove_if(const std::function<bool(const Pending&)>& condition);

 private:
  struct Waiting {
    Pending pending;
    std::optional<int64_t> work;
  };

  std::deque<Waiting> waiting_;  // in the order of arrival
  size_t next_ = 0;
  bool oldest_is_next_ = false;
};

}  // namespace lily::engine
