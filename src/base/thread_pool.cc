#include "base/thread_pool.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <string>
#include <utility>

#if defined(__linux__)
#include <sched.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "base/error.h"

namespace lily {
namespace {

// Loops arrive microseconds apart while a token is computed, so a worker spins a little before it sleeps.
constexpr int kSpins = 20000;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

#if defined(__linux__)
// The cgroup's CPU quota in whole cores, or a large number where none is set.
int quota_cores() {
  std::ifstream in("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (!(in >> quota >> period) || quota == "max" || period <= 0) return 1 << 20;
  return std::max(1, static_cast<int>(std::lround(std::stod(quota) / period)));
}
#endif

}  // namespace

int physical_cores() {
#if defined(__APPLE__)
  int n = 0;
  size_t size = sizeof n;
  // Efficiency cores would be waited for at every barrier: count the performance cores only.
  if (sysctlbyname("hw.perflevel0.physicalcpu", &n, &size, nullptr, 0) == 0 && n > 0) return n;
  if (sysctlbyname("hw.physicalcpu", &n, &size, nullptr, 0) == 0 && n > 0) return n;
#elif defined(__linux__)
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) {
    std::set<std::pair<int, int> > cores;
    int n_logical = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &mask)) continue;
      ++n_logical;
      const std::string base = fmt::format("/sys/devices/system/cpu/cpu{}/topology/", cpu);
      int package = 0, core = 0;
      if ((std::ifstream(base + "physical_package_id") >> package) &&
          (std::ifstream(base + "core_id") >> core))
        cores.emplace(package, core);
      else cores.emplace(-1, cpu);
    }
    const int n = cores.empty() ? n_logical : static_cast<int>(cores.size());
    if (n > 0) return std::min(n, quota_cores());
  }
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// With more threads than cores, one that spins keeps another from working.
ThreadPool::ThreadPool(int n_threads)
    : n_threads_(n_threads),
      n_spins_(n_threads <= static_cast<int>(std::thread::hardware_concurrency()) ? kSpins : 0) {
  LILY_CHECK(n_threads >= 1, "n_threads {}", n_threads);
  try {
    for (int thread = 1; thread < n_threads; ++thread)
      threads_.emplace_back([this, thread] { worker(thread); });
  } catch (...) {  // the destructor does not run, and those that were started must not outlive this
    end();
    throw;
  }
}

ThreadPool::~ThreadPool() { end(); }

void ThreadPool::end() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    generation_.fetch_add(1);
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void ThreadPool::call(int thread) {
  try {
    (*body_)(thread);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
  }
}

void ThreadPool::worker(int thread) {
  uint64_t seen = 0;
  while (true) {
    for (int spin = 0; spin < n_spins_ && generation_.load(std::memory_order_acquire) == seen; ++spin)
      relax();
    if (generation_.load(std::memory_order_acquire) == seen) {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return generation_.load() != seen; });
    }
    seen = generation_.load(std::memory_order_acquire);
    if (stop_) return;
    call(thread);
    if (n_running_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      const std::lock_guard lock(mutex_);
      done_.notify_one();
    }
  }
}

void ThreadPool::run(const std::function<void(int)>& body) {
  body_ = &body;
  n_running_.store(n_threads_ - 1, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    generation_.fetch_add(1, std::memory_order_release);
  }
  if (n_threads_ > 1) wake_.notify_all();
  call(0);
  for (int spin = 0; spin < n_spins_ && n_running_.load(std::memory_order_acquire) != 0; ++spin) relax();
  if (n_running_.load(std::memory_order_acquire) != 0) {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return n_running_.load() == 0; });
  }
  body_ = nullptr;
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void ThreadPool::parallel_for(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  std::atomic<int64_t> next{0};
  run([&](int) {
    while (true) {
      const int64_t begin = next.fetch_add(grain);
      if (begin >= n) return;
      body(begin, std::min(begin + grain, n));
    }
  });
}

}  // namespace lily
