// Runs the lowered ops of a step on the pool's threads. All threads walk through the same intervals, and a
// barrier stands behind each. Of an interval's units each thread has a share that lies together, so that it
// reads memory in one piece and ahead of itself; a thread that is done takes what others have left. Which
// thread runs a unit does not matter to the result, so neither does the number of threads.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/cpu/lower.h"
#include "base/page_block.h"
#include "base/thread_pool.h"

namespace lily::backend::cpu {

// Memory that programs share, since only one runs at a time: values and ops' extra memory, and one block a
// thread.
class Scratch {
 public:
  explicit Scratch(int n_threads) : workers_(static_cast<size_t>(n_threads)) {}
  // Grows to at least this; what it held is lost.
  void reserve(int64_t value_bytes, int64_t worker_bytes);
  std::byte* values() const { return values_.data(); }
  std::byte* worker(int thread) const { return workers_[static_cast<size_t>(thread)].data(); }
  int64_t n_bytes() const;
  // What reserve(value_bytes, worker_bytes) takes from the system.
  static int64_t bytes_of(int64_t value_bytes, int64_t worker_bytes, int n_threads);

 private:
  PageBlock values_;
  std::vector<PageBlock> workers_;
};

// Phases that may run together.
struct Interval {
  std::vector<const Phase*> phases;
};

class Executor {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Executor(ThreadPool& pool);
  // Runs the intervals one after the other. `ends`, if not empty, gets the time when each was over.
  void run(std::span<const Interval> intervals, const Step& step, const Scratch& scratch,
           std::span<Clock::time_point> ends = {});

 private:
  // A thread's units of an interval: the next to run, and the end. They are set in the interval before, when
  // nobody looks at them: those of even and of odd intervals are different ones.
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  Share& share(size_t interval, int thread);
  void set_share(std::span<const Interval> intervals, size_t interval, const Step& step, int thread);
  void work(std::span<const Interval> intervals, const Step& step, Worker worker,
            std::span<Clock::time_point> ends);
  void run_units(const Interval& interval, size_t index, const Step& step, Worker& worker);
  void barrier(int thread);

  ThreadPool& pool_;
  std::unique_ptr<Share[]> shares_;  // [2][threads]
  // The barriers that a thread has reached, on a line of its own; thread 0 sees to it that all have, and says
  // so. (One counter for all would go from core to core once for each of them.)
  struct alignas(64) Reached {
    std::atomic<uint32_t> n{0};
  };
  std::unique_ptr<Reached[]> reached_;  // [threads]; thread 0's: those that all have reached
};

}  // namespace lily::backend::cpu
