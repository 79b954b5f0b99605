// The engine over a scripted executor: failures, cancellation, and readers that leave.
#include <gtest/gtest.h>

#include <algorithm>
#include <new>
#include <random>
#include <thread>

#include "engine/scheduler.h"
#include "tests/engine/engine_fixture.h"

namespace lily::engine {
namespace {

using std::chrono::milliseconds;

TEST_P(EngineOf, AFailedStepEndsItsRequestAndNoOther) {
  const auto engine = make();
  script->fail_wait[2] = "injected: the kernel timed out";
  const GenerateRequest request = greedy(prompt_of(30, 7), 10);
  const Answer failed = read_all(engine->generate(greedy(request.prompt, 10)));
  EXPECT_EQ(failed.finished.finish, Finish::error);
  EXPECT_EQ(failed.finished.fault, Fault::device);
  EXPECT_EQ(failed.finished.error, "injected: the kernel timed out");
  const Answer next = read_all(engine->generate(greedy(request.prompt, 10)));
  EXPECT_EQ(next.ids, expected_tokens(request));
  EXPECT_EQ(engine->stats().n_failed, 1);
}

TEST_P(EngineOf, AnErrorInTheMiddleOfAPromptLeavesUsableStates) {
  const auto engine = make();
  GenerateRequest request = greedy(prompt_of(200, 8), 5);
  request.n_stable = 64;
  script->fail_wait[2] = "injected";
  GenerateRequest again = greedy(request.prompt, 5);
  const Answer failed = read_all(engine->generate(std::move(request)));
  EXPECT_EQ(failed.finished.finish, Finish::error);
  EXPECT_TRUE(failed.ids.empty());
  const std::vector<int32_t> expected = expected_tokens(again);
  const Answer next = read_all(engine->generate(std::move(again)));
  EXPECT_EQ(next.ids, expected);
  EXPECT_EQ(next.finished.usage.cached_tokens, 64) << "what was read before the failure still counts";
}

TEST_P(EngineOf, WhatEndsTheLoopIsAnErrorOfEveryRequestThatRuns) {
  const auto engine = make(limits(), {.max_sequences = 3});
  script->hold();
  script->out_of_memory_from = 1;
  std::vector<Generation> all;
  for (uint64_t i = 0; i < 3; ++i) all.push_back(engine->generate(greedy(prompt_of(100, i), 10)));
  script->await_held();
  script->allow(-1);
  for (auto& g : all) {
    const Answer answer = read_all(g);
    EXPECT_EQ(answer.finished.finish, Finish::error);
    EXPECT_EQ(answer.finished.fault, Fault::device);
    EXPECT_EQ(answer.finished.error.find("the machine's memory ran out"), 0u) << answer.finished.error;
  }
  engine->clear_cache();  // and the figures are of now
  EXPECT_EQ(engine->stats().n_failed, 3);
}

TEST_P(EngineOf, AStepThatCannotStartEndsItsRequest) {
  const auto engine = make();
  script->fail_submit[1] = "injected: out of memory";
  const Answer failed = read_all(engine->generate(greedy(prompt_of(3, 1), 10)));
  EXPECT_EQ(failed.finished.error, "injected: out of memory");
  EXPECT_EQ(read_all(engine->generate(greedy(prompt_of(3, 1), 10))).ids.size(), 10u);
}

TEST_P(EngineOf, WithoutADeviceEveryRequestFailsAndNoneHangs) {
  const auto engine = make();
  script->fail_every_wait_from = 0;
  std::vector<Generation> all;
  for (uint64_t i = 0; i < 10; ++i) all.push_back(engine->generate(greedy(prompt_of(100, i), 10)));
  for (auto& g : all) {
    const Answer answer = read_all(g);
    EXPECT_EQ(answer.finished.finish, Finish::error);
    EXPECT_EQ(answer.finished.error, "the device is gone");
  }
}

TEST_P(EngineOf, CancellationTakesEffectWithinOneChunk) {
  const auto engine = make();
  script->hold();
  Generation generation = engine->generate(greedy(prompt_of(400, 1), 10));
  script->await_held();
  generation.cancel();
  script->allow(-1);
  const Answer answer = read_all(generation);
  EXPECT_EQ(answer.finished.finish, Finish::cancelled);
  EXPECT_EQ(script->steps().size(), 1u);
  // What was read is kept.
  const Answer again = read_all(engine->generate(greedy(prompt_of(400, 1), 10)));
  EXPECT_EQ(again.finished.usage.cached_tokens, 64);
  EXPECT_EQ(again.ids, expected_tokens(greedy(prompt_of(400, 1), 10)));
}

TEST_P(EngineOf, CancellationTakesEffectWithinOneToken) {
  const auto engine = make();
  script->hold();
  Generation generation = engine->generate(greedy(prompt_of(4, 1), 100));
  script->allow(5);  // the prompt and four tokens more
  std::vector<int32_t> ids;
  while (ids.size() < 5)
    if (const auto event = generation.next(); std::holds_alternative<Token>(*event))
      ids.push_back(std::get<Token>(*event).id);
  generation.cancel();
  script->allow(-1);
  const Answer rest = read_all(generation);
  EXPECT_EQ(rest.finished.finish, Finish::cancelled);
  EXPECT_LE(rest.ids.size(), 1u);
  EXPECT_LE(script->steps().size(), 5u + 2u);
}

TEST_P(EngineOf, AReaderThatLeavesIsCancelled) {
  const auto engine = make();
  {
    const Generation dropped = engine->generate(greedy(prompt_of(4, 1), 400));
  }
  // Its place is free again: a request of the whole context is served.
  EXPECT_EQ(read_all(engine->generate(greedy(prompt_of(4, 2), 400))).ids.size(), 400u);
  await_idle(*engine);
}

TEST_P(EngineOf, AReaderThatStopsReadingIsCancelledAndTheOthersGoOn) {
  const auto engine = make(limits(), {.event_capacity = 10});
  Generation slow = engine->generate(greedy(prompt_of(4, 1), 300));
  // Between the queue and its first step a request neither waits nor runs.
  while (engine->stats().n_requests == 0) std::this_thread::sleep_for(milliseconds(1));
  await_idle(*engine);
  const Answer answer = read_all(slow);
  EXPECT_EQ(answer.finished.finish, Finish::cancelled);
  EXPECT_LE(answer.ids.size(), 10u);
  EXPECT_EQ(answer.finished.usage.completion_tokens, static_cast<int32_t>(answer.ids.size()) + 1);
}

TEST_P(EngineOf, DestructionEndsWhatRunsAndWhatWaits) {
  std::vector<Generation> all;
  {
    const auto engine = make(limits(), {.max_sequences = 2});
    script->hold();
    for (uint64_t i = 0; i < 6; ++i) all.push_back(engine->generate(greedy(prompt_of(100, i), 50)));
    script->await_held();
    script->allow(-1);
  }
  for (auto& g : all) {
    const Answer answer = read_all(g);
    EXPECT_TRUE(answer.finished.finish == Finish::cancelled || answer.finished.finish == Finish::length);
  }
}

// Everything at once, from many threads: for the thread sanitizer as much as for the assertions.
TEST_P(EngineOf, ManyThreadsWithFailuresAndImpatientReaders) {
  Limits tight = limits();
  tight.n_kv_blocks = 20;
  tight.n_state_slots = 12;
  const auto engine = make(tight, {.max_sequences = 3, .queue_capacity = 8, .event_capacity = 16});
  for (int i = 5; i < 2000; i += 37) script->fail_wait[i] = "injected";
  std::vector<std::thread> clients;
  for (uint32_t c = 0; c < 6; ++c)
    clients.emplace_back([&, c] {
      std::mt19937 random(c);
      for (int i = 0; i < 25; ++i) {
        const uint32_t r = random();
        GenerateRequest request =
            greedy(prompt_of(1 + static_cast<int>(r % 100), r % 3), 1 + static_cast<int>(r % 40));
        const std::vector<int32_t> expected = expected_tokens(request);
        try {
          Generation generation = engine->generate(std::move(request));
          if (r % 11 == 0) generation.cancel();
          if (r % 13 == 0) continue;  // leaves
          const Answer answer = read_all(generation);
          ASSERT_LE(answer.ids.size(), expected.size());
          EXPECT_TRUE(std::equal(answer.ids.begin(), answer.ids.end(), expected.begin()));
          if (answer.finished.finish == Finish::length) EXPECT_EQ(answer.ids, expected);
        } catch (const QueueFull&) {
          std::this_thread::sleep_for(milliseconds(1));
        }
        if (r % 17 == 0) engine->clear_cache();
        engine->stats();
      }
    });
  for (std::thread& client : clients) client.join();
  while (engine->stats().n_running + engine->stats().n_waiting > 0)
    std::this_thread::sleep_for(milliseconds(1));
  engine->clear_cache();
  EXPECT_EQ(engine->stats().n_free_blocks, tight.n_kv_blocks);
  EXPECT_EQ(engine->stats().n_free_states, tight.n_state_slots);
}

// Without threads: integrity after every single step.
TEST_P(EngineOf, EveryStepLeavesSlotsAndBlocksInOrder) {
  Limits tight = limits();
  tight.n_kv_blocks = 12;
  tight.n_state_slots = 9;
  ScriptedExecutor executor(tight);
  for (int i = 9; i < 3000; i += 53) executor.fail_wait[i] = "injected";
  Scheduler scheduler(executor, {.max_sequences = 3});
  std::mt19937 random(21);
  std::vector<std::shared_ptr<EventChannel>> channels;
  for (int i = 0; i < 3000; ++i) {
    const uint32_t r = random();
    GenerateRequest request =
        greedy(prompt_of(1 + static_cast<int>(r % 150), r % 3), 1 + static_cast<int>(r % 20));
    request.n_stable = static_cast<int32_t>((r >> 8) % request.prompt.size());
    request.branches = {static_cast<int32_t>((r >> 4) % request.prompt.size()), 70};
    if (r % 4 == 0 && scheduler.can_admit(request)) {
      channels.push_back(std::make_shared<EventChannel>(1000));
      scheduler.admit({std::move(request), channels.back(), Clock::now()});
    }
    if (r % 29 == 0 && !channels.empty()) channels.back()->cancel();
    scheduler.advance();
    scheduler.check_integrity();
  }
  while (scheduler.advance()) scheduler.check_integrity();
  scheduler.clear_cache();
  scheduler.check_integrity();
  EXPECT_EQ(scheduler.n_running(), 0);
  EXPECT_GT(channels.size(), 50u);
}

}  // namespace
}  // namespace lily::engine
