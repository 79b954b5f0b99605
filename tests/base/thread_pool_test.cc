#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace lily {
namespace {

TEST(ThreadPool, EveryThreadRunsOnceARun) {
  for (int n_threads : {1, 2, 5}) {
    ThreadPool pool(n_threads);
    std::vector<int> n_calls(n_threads, 0);
    for (int round = 0; round < 200; ++round) pool.run([&](int thread) { ++n_calls[thread]; });
    for (int n : n_calls) EXPECT_EQ(n, 200);
  }
}

TEST(ThreadPool, ParallelForCoversTheRangeOnce) {
  ThreadPool pool(3);
  for (int64_t n : {0, 1, 7, 1000}) {
    std::vector<std::atomic<int>> seen(n);
    pool.parallel_for(n, 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) seen[i].fetch_add(1);
    });
    for (auto& count : seen) EXPECT_EQ(count.load(), 1);
  }
}

TEST(ThreadPool, AnExceptionReachesTheCallerAndThePoolGoesOn) {
  ThreadPool pool(2);
  EXPECT_THROW(pool.run([](int thread) {
    if (thread == 1) throw std::runtime_error("worker");
  }),
               std::runtime_error);
  std::atomic<int> n{0};
  pool.run([&](int thread) { n += thread == 0; });
  EXPECT_EQ(n, 1);
}

TEST(ThreadPool, CountsAtLeastOneCore) { EXPECT_GE(physical_cores(), 1); }

}  // namespace
}  // namespace lily
