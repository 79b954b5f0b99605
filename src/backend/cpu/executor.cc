#include "backend/cpu/executor.h"

#include <utility>

#include "base/error.h"

namespace lily::backend::cpu {
namespace {

// Intervals take microseconds, so a thread polls; after this many polls (some 50 microseconds) another
// program seems to have the core of a thread that is waited for, and sleeping leaves it more.
constexpr int kPollsBeforeSleep = 2000;

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void Scratch::reserve(int64_t value_bytes, int64_t worker_bytes) {
  if (std::cmp_less(values_.size(), value_bytes)) values_ = PageBlock(static_cast<size_t>(value_bytes));
  for (PageBlock& worker : workers_)
    if (std::cmp_less(worker.size(), worker_bytes)) worker = PageBlock(static_cast<size_t>(worker_bytes));
}

int64_t Scratch::n_bytes() const {
  size_t sum = values_.size();
  for (const PageBlock& worker : workers_) sum += worker.size();
  return static_cast<int64_t>(sum);
}

int64_t Scratch::bytes_of(int64_t value_bytes, int64_t worker_bytes, int n_threads) {
  constexpr int64_t kPage = PageBlock::kAlignment;
  const auto whole_pages = [](int64_t n) { return (n + kPage - 1) / kPage * kPage; };
  return whole_pages(value_bytes) + n_threads * whole_pages(worker_bytes);
}

Executor::Executor(ThreadPool& pool)
    : pool_(pool), shares_(std::make_unique<Share[]>(static_cast<size_t>(pool.n_threads()))) {}

void Executor::run(std::span<const Interval> intervals, const Step& step, const Scratch& scratch,
                   std::span<Clock::time_point> ends) {
  intervals_ = intervals;
  step_ = &step;
  ends_ = ends;
  n_units_.assign(intervals.size(), 0);
  for (size_t i = 0; i < intervals.size(); ++i)
    for (const Phase* phase : intervals[i].phases) n_units_[i] += phase->n_units(step);
  for (int thread = 0; thread < pool_.n_threads(); ++thread)
    shares_[static_cast<size_t>(thread)].taken.store(0, std::memory_order_relaxed);
  open_from(0);
  pool_.run([&](int thread) { work({thread, scratch.worker(thread)}); });
}

void Executor::work(Worker worker) {
  for (;;) {
    const size_t interval = current_.load(std::memory_order_acquire);
    if (interval == intervals_.size()) return;
    // Who has run units is in time: the interval cannot be over before they are counted.
    int64_t n = 0;
    try {
      n = run_units(interval, worker);
    } catch (...) {  // its units are never counted: nobody else opens an interval after this one
      current_.store(static_cast<uint32_t>(intervals_.size()), std::memory_order_release);
      current_.notify_all();
      throw;
    }
    if (n > 0 && n_left_.fetch_sub(n, std::memory_order_acq_rel) == n) open_after(interval);
    else wait_for_end_of(interval);
  }
}

void Executor::open_after(size_t interval) {
  if (!ends_.empty()) ends_[interval] = Clock::now();
  open_from(interval + 1);
  current_.notify_all();
}

void Executor::open_from(size_t interval) {
  for (; interval < intervals_.size() && n_units_[interval] == 0; ++interval)
    if (!ends_.empty()) ends_[interval] = Clock::now();
  if (interval < intervals_.size()) n_left_.store(n_units_[interval], std::memory_order_relaxed);
  current_.store(static_cast<uint32_t>(interval), std::memory_order_release);
}

void Executor::wait_for_end_of(size_t interval) {
  const auto waited_for = static_cast<uint32_t>(interval);
  for (int poll = 0; poll < kPollsBeforeSleep; ++poll) {
    if (current_.load(std::memory_order_acquire) != waited_for) return;
    pause_briefly();
  }
  current_.wait(waited_for, std::memory_order_acquire);
}

int64_t Executor::run_units(size_t index, Worker& worker) {
  const Interval& interval = intervals_[index];
  const int n_threads = pool_.n_threads();
  int64_t n_run = 0;
  size_t phase = 0;
  int64_t first = 0, n = interval.phases[0]->n_units(*step_);
  bool prepared = false;
  for (int i = 0; i < n_threads; ++i) {
    const int thread = (worker.thread + i) % n_threads;
    while (const std::optional<int64_t> taken = take_unit(index, thread)) {
      const int64_t unit = *taken;
      if (unit < first) {  // of a thread that began with an earlier phase
        phase = 0, first = 0, n = interval.phases[0]->n_units(*step_);
        prepared = false;
      }
      while (unit >= first + n) {
        first += n;
        n = interval.phases[++phase]->n_units(*step_);
        prepared = false;
      }
      const Phase& p = *interval.phases[phase];
      if (!prepared && p.prepare) p.prepare(*step_, worker);
      prepared = true;
      p.run(*step_, worker, unit - first);
      ++n_run;
    }
  }
  return n_run;
}

// A share from which nothing has been taken in an interval that is over was empty in it: a thread that comes
// late finds either nothing in it, or that it belongs to a later interval.
std::optional<int64_t> Executor::take_unit(size_t interval, int thread) {
  constexpr int kUnitBits = 32;
  const uint64_t mine = uint64_t{interval} + 1;
  const int64_t n_units = n_units_[interval];
  const int64_t end = n_units * (thread + 1) / pool_.n_threads();
  std::atomic<uint64_t>& taken = shares_[static_cast<size_t>(thread)].taken;
  for (uint64_t seen = taken.load(std::memory_order_relaxed);;) {
    if (seen >> kUnitBits > mine) return {};
    const auto unit = seen >> kUnitBits == mine ? static_cast<int64_t>(seen & 0xffffffff)
                                                : n_units * thread / pool_.n_threads();
    if (unit >= end) return {};
    const uint64_t next = mine << kUnitBits | static_cast<uint64_t>(unit + 1);
    if (taken.compare_exchange_weak(seen, next, std::memory_order_relaxed)) return unit;
  }
}

}  // namespace lily::backend::cpu
