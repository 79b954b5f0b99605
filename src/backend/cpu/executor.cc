#include "backend/cpu/executor.h"

#include <utility>

#include "base/error.h"

namespace lily::backend::cpu {
namespace {

// Barriers are microseconds apart, so a thread polls; after this many polls (some 50 microseconds) another
// program seems to have the core of a thread that is waited for, and sleeping leaves it more.
constexpr int kPollsBeforeSleep = 2000;

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns when `n` is `count`, which is one more than it was.
void wait_for(const std::atomic<uint32_t>& n, uint32_t count) {
  for (int poll = 0; poll < kPollsBeforeSleep; ++poll) {
    if (n.load(std::memory_order_acquire) == count) return;
    pause_briefly();
  }
  n.wait(count - 1, std::memory_order_acquire);
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
    : pool_(pool),
      shares_(std::make_unique<Share[]>(2 * static_cast<size_t>(pool.n_threads()))),
      reached_(std::make_unique<Reached[]>(static_cast<size_t>(pool.n_threads()))) {}

Executor::Share& Executor::share(size_t interval, int thread) {
  return shares_[interval % 2 * static_cast<size_t>(pool_.n_threads()) + static_cast<size_t>(thread)];
}

void Executor::set_share(std::span<const Interval> intervals, size_t interval, const Step& step, int thread) {
  if (interval >= intervals.size()) return;
  int64_t n_units = 0;
  for (const Phase* phase : intervals[interval].phases) n_units += phase->n_units(step);
  Share& own = share(interval, thread);
  own.next.store(n_units * thread / pool_.n_threads(), std::memory_order_relaxed);
  own.end = n_units * (thread + 1) / pool_.n_threads();
}

void Executor::run(std::span<const Interval> intervals, const Step& step, const Scratch& scratch,
                   std::span<Clock::time_point> ends) {
  for (int thread = 0; thread < pool_.n_threads(); ++thread) set_share(intervals, 0, step, thread);
  pool_.run([&](int thread) { work(intervals, step, {thread, scratch.worker(thread)}, ends); });
}

void Executor::work(std::span<const Interval> intervals, const Step& step, Worker worker,
                    std::span<Clock::time_point> ends) {
  for (size_t i = 0; i < intervals.size(); ++i) {
    set_share(intervals, i + 1, step, worker.thread);
    run_units(intervals[i], i, step, worker);
    barrier(worker.thread);
    if (worker.thread == 0 && !ends.empty()) ends[i] = Clock::now();
  }
}

void Executor::run_units(const Interval& interval, size_t index, const Step& step, Worker& worker) {
  if (interval.phases.empty()) return;
  const int n_threads = pool_.n_threads();
  size_t phase = 0;
  int64_t first = 0, n = interval.phases[0]->n_units(step);
  bool prepared = false;
  for (int i = 0; i < n_threads; ++i) {
    Share& from = share(index, (worker.thread + i) % n_threads);
    while (from.next.load(std::memory_order_relaxed) < from.end) {
      const int64_t unit = from.next.fetch_add(1, std::memory_order_relaxed);
      if (unit >= from.end) break;
      if (unit < first) {  // of a thread that began with an earlier phase
        phase = 0, first = 0, n = interval.phases[0]->n_units(step);
        prepared = false;
      }
      while (unit >= first + n) {
        first += n;
        n = interval.phases[++phase]->n_units(step);
        prepared = false;
      }
      const Phase& p = *interval.phases[phase];
      if (!prepared && p.prepare) p.prepare(step, worker);
      prepared = true;
      p.run(step, worker, unit - first);
    }
  }
}

void Executor::barrier(int thread) {
  const int n_threads = pool_.n_threads();
  if (n_threads == 1) return;
  std::atomic<uint32_t>& all = reached_[0].n;
  const uint32_t count = all.load(std::memory_order_relaxed) + 1;
  if (thread == 0) {
    for (int t = 1; t < n_threads; ++t) wait_for(reached_[static_cast<size_t>(t)].n, count);
    all.store(count, std::memory_order_release);
    all.notify_all();
  } else {
    std::atomic<uint32_t>& own = reached_[static_cast<size_t>(thread)].n;
    own.store(count, std::memory_order_release);
    own.notify_one();
    wait_for(all, count);
  }
}

}  // namespace lily::backend::cpu
