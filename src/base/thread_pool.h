// A fixed set of worker threads that run one parallel loop at a time; the CPU backend's and the loader's
// threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace lily {

// Cores that are not hyper-threads of another one, limited by the process's affinity mask and cgroup quota;
// >= 1.
int physical_cores();

class ThreadPool {
 public:
  // n_threads counts the caller, which always takes part; n_threads - 1 threads are started.
  explicit ThreadPool(int n_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int n_threads() const { return n_threads_; }

  // Calls body(thread) once on each thread, 0 <= thread < n_threads(), and returns when all have returned. If
  // one throws, the first exception is rethrown here after all have finished. Not reentrant.
  void run(const std::function<void(int thread)>& body);

  // Calls body(begin, end) over [0, n) in consecutive pieces of `grain` handed out dynamically. Which thread
  // takes which piece varies; results may not depend on it.
  void parallel_for(int64_t n, int64_t grain, const std::function<void(int64_t begin, int64_t end)>& body);

 private:
  void worker(int thread);
  void call(int thread);
  void end();

  const int n_threads_;
  const int n_spins_;  // before a thread that waits goes to sleep
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(int)>* body_ = nullptr;
  std::atomic<uint64_t> generation_{0};  // raised once a run, and once at the end
  std::atomic<int> n_running_{0};
  std::atomic<bool> stop_{false};
  std::exception_ptr failure_;  // guarded by mutex_
};

}  // namespace lily
