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

TEST(OutOfMemory, TheLastEventArrivesWithoutMemoryForIt) {
  for (int n_before = 0; n_before < 4; ++n_before) {
    EventChannel channel(100);
    for (int i = 0; i < n_before; ++i) channel.push(Token{.id = i});
    Finished end{.finish = Finish::error, .error = std::string(100, 'x')};
    bool failed = false;
    allocations_left = 0;
    try {
      channel.push(std::move(end));
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    allocations_left = -1;
    EXPECT_FALSE(failed) << "after " << n_before << " tokens";
    const auto soon = std::chrono::steady_clock::now();
    for (int i = 0; i < n_before; ++i) EXPECT_TRUE(std::holds_alternative<Token>(channel.next(soon).value()));
    EXPECT_FALSE(channel.done());
    const std::optional<Event> last = channel.next(soon);
    ASSERT_TRUE(last && std::holds_alternative<Finished>(*last));
    EXPECT_EQ(std::get<Finished>(*last).error, std::string(100, 'x'));
    EXPECT_TRUE(channel.done());
    EXPECT_FALSE(channel.next(std::nullopt)) << "nothing comes after it";
  }
}

TEST(OutOfMemory, AFailureTextThatDoesNotFitIsShortened) {
  const std::string text(100, 'x');
  EXPECT_EQ(copy_of_error(text), text);
  allocations_left = 0;
  const std::string copy = copy_of_error(text);
  allocations_left = -1;
  EXPECT_EQ(copy, "out of memory");
}

}  // namespace
}  // namespace lily::engine
