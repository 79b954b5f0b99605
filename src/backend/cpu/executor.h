// Runs the lowered ops of a step on the pool's threads, one interval after the other. Of an interval's units
// each thread has a share that lies together, so that it reads memory in one piece and ahead of itself; a
// thread that is done takes what others have left. Which thread runs a unit does not matter to the result, so
// neither does the number of threads.
//
// An interval is over when all its units have run, and not when all threads have been there: one whose core
// another program has got (a client that reads tokens on the same machine) keeps the others only from the
// unit that it is in the middle of, and joins them where they are by then.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
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
  // A thread's units of an interval that nobody has taken yet.
  struct alignas(64) Share {
    // One more than the interval of which units were last taken from this share, and the next unit. Together,
    // so that a thread that comes late takes nothing of an interval that it does not mean.
    std::atomic<uint64_t> taken{0};
  };
  void work(Worker worker);
  // The units that this thread has run; none if the interval is over.
  int64_t run_units(size_t interval, Worker& worker);
  std::optional<int64_t> take_unit(size_t interval, int thread);
  // Opens the next interval that has units, after this one or from the first one on.
  void open_after(size_t interval);
  void open_from(size_t interval);
  void wait_for_end_of(size_t interval);

  ThreadPool& pool_;
  std::unique_ptr<Share[]> shares_;  // [threads]
  // Of the run; set while no thread works.
  std::span<const Interval> intervals_;
  const Step* step_ = nullptr;
  std::span<Clock::time_point> ends_;
  std::vector<int64_t> n_units_;  // [intervals]

  alignas(64) std::atomic<int64_t> n_left_{0};    // units of the open interval that have not run yet
  alignas(64) std::atomic<uint32_t> current_{0};  // the open interval, or their number after the last one
};

}  // namespace lily::backend::cpu
