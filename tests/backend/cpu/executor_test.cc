#include "backend/cpu/executor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

namespace lily::backend::cpu {
namespace {

// A step of one row of a plan without ops; the phases below look at nothing in it.
struct Fixture {
  plan::Plan plan{.dims = model::lily_tiny(), .shape = {.rows = 1, .context = 64}};
  Memory memory{plan.dims, {.n_state_slots = 1, .n_kv_blocks = 1}, plan::KvType::bf16};
  Step step{plan, memory};
  ThreadPool pool;
  Executor executor{pool};
  Scratch scratch;

  explicit Fixture(int n_threads) : pool(n_threads), scratch(n_threads) { scratch.reserve(0, 64); }
  void run(const std::vector<Phase>& phases, const std::vector<std::vector<size_t>>& together) {
    std::vector<Interval> intervals;
    for (const auto& indices : together) {
      intervals.emplace_back();
      for (const size_t i : indices) intervals.back().phases.push_back(&phases[i]);
    }
    executor.run(intervals, step, scratch);
  }
};

class ExecutorTest : public testing::TestWithParam<int> {};

TEST_P(ExecutorTest, EveryUnitRunsOnceAndAfterTheIntervalsBeforeIt) {
  Fixture f(GetParam());
  constexpr int64_t kUnits[] = {1, 0, 57, 3, 200};
  for (int round = 0; round < 50; ++round) {
    std::vector<std::vector<std::atomic<int>>> seen;
    std::atomic<int64_t> done{0};
    std::vector<Phase> phases;
    for (const int64_t n : kUnits) seen.emplace_back(static_cast<size_t>(n));
    // Phases 0 to 2 run together, then 3, then 4.
    const int64_t before[] = {0, 0, 0, 58, 61};
    for (size_t i = 0; i < 5; ++i) {
      phases.push_back({[&, i](const Step&) { return kUnits[i]; },
                        [&, i](const Step&, Worker&, int64_t unit) {
                          EXPECT_GE(done.load(), before[i]);
                          seen[i][static_cast<size_t>(unit)].fetch_add(1);
                          done.fetch_add(1);
                        },
                        {}});
    }
    f.run(phases, {{0, 1, 2}, {3}, {}, {4}});
    for (const auto& phase : seen)
      EXPECT_TRUE(std::ranges::all_of(phase, [](const std::atomic<int>& n) { return n.load() == 1; }));
    EXPECT_EQ(done.load(), std::accumulate(std::begin(kUnits), std::end(kUnits), int64_t{0}));
  }
}

TEST_P(ExecutorTest, AThreadPreparesBeforeItsFirstUnitOfAPhase) {
  Fixture f(GetParam());
  const auto n_threads = static_cast<size_t>(GetParam());
  std::vector<std::vector<int>> prepared(2, std::vector<int>(n_threads, 0));
  std::vector<std::vector<int>> ran(prepared);
  std::vector<Phase> phases;
  for (size_t i = 0; i < 2; ++i) {
    phases.push_back({[](const Step&) { return int64_t{40}; },
                      [&, i](const Step&, Worker& worker, int64_t) {
                        const auto thread = static_cast<size_t>(worker.thread);
                        // What the other phase prepared is gone.
                        EXPECT_EQ(*reinterpret_cast<size_t*>(worker.scratch), i);
                        ++ran[i][thread];
                      },
                      [&, i](const Step&, Worker& worker) {
                        ++prepared[i][static_cast<size_t>(worker.thread)];
                        *reinterpret_cast<size_t*>(worker.scratch) = i;
                      }});
  }
  f.run(phases, {{0, 1}});
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(std::accumulate(ran[i].begin(), ran[i].end(), 0), 40);
    for (size_t thread = 0; thread < n_threads; ++thread) {
      // Once in its own share, and again with what it takes of others'.
      EXPECT_LE(prepared[i][thread], GetParam());
      EXPECT_EQ(prepared[i][thread] > 0, ran[i][thread] > 0);
    }
  }
}

TEST_P(ExecutorTest, UnitsOfASlowThreadAreTakenByOthers) {
  if (GetParam() == 1) GTEST_SKIP() << "one thread has nobody to take its units";
  Fixture f(GetParam());
  // Thread 0 stays in its first unit until all others have run.
  constexpr int64_t kUnits = 60;
  std::atomic<int64_t> n_others{0}, n_own{0};
  const Phase phase{[](const Step&) { return kUnits; },
                    [&](const Step&, Worker& worker, int64_t) {
                      if (worker.thread != 0) {
                        n_others.fetch_add(1);
                      } else if (n_own.fetch_add(1) == 0) {
                        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
                        while (n_others.load() < kUnits - 1 && std::chrono::steady_clock::now() < end)
                          std::this_thread::yield();
                      }
                    },
                    {}};
  f.run({phase}, {{0}});
  EXPECT_EQ(n_own.load() + n_others.load(), kUnits);
  EXPECT_LE(n_own.load(), 1);
}

// Whose core another program has got between two of its units.
TEST_P(ExecutorTest, AThreadThatIsAwayKeepsNobodyWaitingAndTakesNothingTwice) {
  if (GetParam() == 1) GTEST_SKIP() << "one thread waits for nobody";
  Fixture f(GetParam());
  const auto own_thread = std::this_thread::get_id();
  constexpr size_t kIntervals = 20;
  constexpr int64_t kUnits = 3;  // fewer than threads: some shares are empty
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> n_arrived{0}, n_asleep{0};
    std::atomic<bool> is_last_over{false};
    std::vector<std::atomic<int>> ran(kIntervals * kUnits);
    const auto wait_for = [](const auto& done) {
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (!done() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
      EXPECT_TRUE(done());
    };
    std::vector<Phase> phases;
    std::vector<std::vector<size_t>> together;
    for (size_t i = 0; i <= kIntervals; ++i) {
      together.push_back({i});
      if (i == 0) {  // all threads are here
        phases.push_back({[&](const Step&) { return int64_t{GetParam()}; },
                          [&](const Step&, Worker&, int64_t) {
                            n_arrived.fetch_add(1);
                            wait_for([&] { return n_arrived.load() == GetParam(); });
                          },
                          {}});
        continue;
      }
      phases.push_back({[&, i](const Step&) {
                          if (std::this_thread::get_id() != own_thread) {
                            n_asleep.fetch_add(1);
                            wait_for([&] { return is_last_over.load(); });
                          } else if (i == 1 && n_arrived.load() == GetParam()) {
                            wait_for([&] { return n_asleep.load() > 0; });  // one is away from here on
                          }
                          return kUnits;
                        },
                        [&, i](const Step&, Worker&, int64_t unit) {
                          ran[(i - 1) * kUnits + static_cast<size_t>(unit)].fetch_add(1);
                          if (i == kIntervals && unit == kUnits - 1) is_last_over = true;
                        },
                        {}});
    }
    f.run(phases, together);
    EXPECT_TRUE(std::ranges::all_of(ran, [](const std::atomic<int>& n) { return n.load() == 1; }));
    EXPECT_GT(n_asleep.load(), 0);
  }
}

// The other threads must not wait for a unit that nobody will ever have run.
TEST_P(ExecutorTest, APhaseThatThrowsEndsTheStepAndTheNextOneRuns) {
  Fixture f(GetParam());
  constexpr int64_t kUnits = 40;
  for (const int64_t bad : {int64_t{0}, kUnits / 2, kUnits - 1}) {
    bool throws = true;
    std::atomic<int64_t> n_after{0};
    std::vector<Phase> phases;
    phases.push_back({[](const Step&) { return kUnits; },
                      [&, bad](const Step&, Worker&, int64_t unit) {
                        if (throws && unit == bad) throw std::runtime_error("no memory for a unit");
                      },
                      {}});
    phases.push_back({[](const Step&) { return kUnits; },
                      [&](const Step&, Worker&, int64_t) { n_after.fetch_add(1); },
                      {}});
    EXPECT_THROW(f.run(phases, {{0}, {1}}), std::runtime_error);
    EXPECT_EQ(n_after.load(), 0);
    throws = false;
    f.run(phases, {{0}, {1}});
    EXPECT_EQ(n_after.load(), kUnits);
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, ExecutorTest, testing::Values(1, 2, 5));

}  // namespace
}  // namespace lily::backend::cpu
