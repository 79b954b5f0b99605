// The scheduler where an allocation fails: nothing stays promised or held. A program of its own, because it
// replaces the global operator new.
#include <gtest/gtest.h>

#include <cstdlib>
#include <new>

#include "engine/scheduler.h"
#include "tests/engine/scripted_executor.h"

namespace {

thread_local int allocations_left = -1;  // until one fails; -1: none does

}  // namespace

// The two below belong together; a compiler that inlines one of them cannot know.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
void* operator new(std::size_t n) {
  if (allocations_left == 0) {
    allocations_left = -1;
    throw std::bad_alloc();
  }
  if (allocations_left > 0) --allocations_left;
  if (void* const memory = std::malloc(n == 0 ? 1 : n)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace lily::engine {
namespace {

TEST(OutOfMemory, AnAdmissionThatFailsAnywhereLeavesNothingPromised) {
  int n_failed = 0;
  for (int n_good = 0;; ++n_good) {
    ScriptedExecutor executor(ScriptedExecutor::pipelined());
    Scheduler scheduler(executor, {.max_sequences = 3});
    Pending pending{.request = {.prompt = std::vector<int32_t>(100, 7), .max_tokens = 5},
                    .channel = std::make_shared<EventChannel>(100)};
    bool failed = false;
    allocations_left = n_good;
    try {
      scheduler.admit(std::move(pending));
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    allocations_left = -1;
    scheduler.cancel_all(Finish::error, Fault::device, "out of memory");
    scheduler.clear_cache();
    EXPECT_EQ(scheduler.n_running(), 0);
    scheduler.check_integrity();
    if (!failed) break;
    ++n_failed;
  }
  EXPECT_GE(n_failed, 2) << "the sequence and its place among those that run";
}

}  // namespace
}  // namespace lily::engine
