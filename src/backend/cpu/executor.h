// Runs the lowered ops of a step on the pool's threads. All threads walk through the same intervals; the
// units of an interval are handed out one by one, and a barrier stands behind each. Which thread runs a unit
// does not matter to the result, so neither does the number of threads.
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

  explicit Executor(ThreadPool& pool) : pool_(pool) {}
  // The most intervals that a run will have; at least as many as any op has phases.
  void reserve(size_t n_intervals);
  // Runs the intervals one after the other. `ends`, if not empty, gets the time when each was over.
  void run(std::span<const Interval> intervals, const Step& step, const Scratch& scratch,
           std::span<Clock::time_point> ends = {});

 private:
  // The units of an interval: how many its phases have, and the next to hand out.
  struct alignas(64) Queue {
    std::atomic<int64_t> next{0};
    int64_t n_units = 0;
  };
  void work(std::span<const Interval> intervals, const Step& step, Worker worker,
            std::span<Clock::time_point> ends);
  void run_units(const Interval& interval, Queue& queue, const Step& step, Worker& worker);
  void barrier();

  ThreadPool& pool_;
  std::unique_ptr<Queue[]> queues_;
  size_t n_queues_ = 0;
  alignas(64) std::atomic<int> n_arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
};

}  // namespace lily::backend::cpu
