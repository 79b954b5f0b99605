// States and KV blocks out of one budget: what is where, what goes first, and what is given back.
#include "engine/memory_pool.h"

#include <gtest/gtest.h>

#include <random>

#include "engine/prefix_cache.h"
#include "engine/scheduler.h"
#include "tests/engine/scripted_executor.h"

namespace lily::engine {
namespace {

constexpr int64_t kState = 1000, kBlock = 100;

// As many of each as the budget holds, so not both.
Limits pooled(int64_t n_bytes) {
  Limits l = ScriptedExecutor::small();
  l.max_context = 1024;
  l.state_bytes = kState;
  l.block_bytes = kBlock;
  l.pool_bytes = n_bytes;
  l.n_state_slots = static_cast<int>(n_bytes / kState);
  l.n_kv_blocks = static_cast<int>(n_bytes / kBlock);
  return l;
}

std::vector<int32_t> text(unsigned seed, int n) {
  std::mt19937 random(seed);
  std::vector<int32_t> tokens;
  for (int i = 0; i < n; ++i) tokens.push_back(static_cast<int32_t>(random() % 100));
  return tokens;
}

std::vector<int32_t> expected(std::vector<int32_t> prompt, int n_tokens) {
  std::vector<int32_t> answer;
  for (int i = 0; i < n_tokens; ++i) {
    std::vector<float> logits = logits_of(prompt, 104);
    logits.resize(100);
    answer.push_back(plan::greedy_token(logits));
    prompt.push_back(answer.back());
  }
  return answer;
}

class Pool : public testing::Test {
 protected:
  explicit Pool(int64_t n_bytes = 12 * kState)
      : executor_(pooled(n_bytes)), scheduler_(executor_, options()) {}

  EngineOptions options() {
    return {.max_sequences = 2,
            .available_memory = [this] { return available_; },
            .least_available_bytes = 1'000'000};
  }

  // Answers one prompt to its end; how many of its tokens were cached.
  int32_t ask(const std::vector<int32_t>& prompt, const std::string& session = {}) {
    auto channel = std::make_shared<EventChannel>(1000);
    GenerateRequest request{.prompt = prompt, .session = session, .max_tokens = 3};
    request.sampling.temperature = 0;
    EXPECT_TRUE(scheduler_.can_admit(request));
    scheduler_.admit({.request = std::move(request), .channel = channel});
    while (scheduler_.advance()) {
      scheduler_.check_integrity();
      EXPECT_LE(stats().resident_bytes, executor_.limits().pool_bytes);
    }
    std::vector<int32_t> answer;
    while (auto event = channel->next(Clock::now())) {
      if (const auto* token = std::get_if<Token>(&*event)) answer.push_back(token->id);
      if (const auto* end = std::get_if<Finished>(&*event)) {
        EXPECT_EQ(end->finish, Finish::length) << end->error;
        EXPECT_EQ(answer, expected(prompt, 3));
        return end->usage.cached_tokens;
      }
    }
    ADD_FAILURE() << "no end";
    return 0;
  }
  EngineStats stats() const {
    EngineStats stats;
    scheduler_.report(stats);
    return stats;
  }
  void look_at_memory() { scheduler_.relieve_pressure(now_ += std::chrono::seconds(1)); }

  int64_t available_ = 10'000'000;
  Clock::time_point now_ = Clock::now();
  ScriptedExecutor executor_;
  Scheduler scheduler_;
};

TEST_F(Pool, WhatShortPromptsDoNotNeedForKvHoldsTheirStates) {
  for (unsigned i = 0; i < 8; ++i) ask(text(i, 40), std::to_string(i));
  // Of 12,000 bytes; with a fixed half for each kind it would be 6 states.
  EXPECT_GE(12 - stats().n_free_states, 9);
  EXPECT_EQ(ask(text(7, 50)), 40) << "it goes on from the prompt's end";
}

TEST_F(Pool, ALongPromptHasTheMemoryOfStates) {
  for (unsigned i = 0; i < 8; ++i) ask(text(i, 40), std::to_string(i));
  EXPECT_LT(stats().resident_bytes + 16 * kBlock, 14 * kState);
  EXPECT_EQ(ask(text(100, 1000), "long"), 0);
  EXPECT_GE(stats().n_blocks - stats().n_free_blocks, 16);
  EXPECT_GT(executor_.n_given_back(), 0) << "free states became blocks";
  EXPECT_EQ(ask(text(100, 1010)), 1000);
}

TEST_F(Pool, WhatDoesNotFitBesideWhatRunsWaits) {
  auto channel = std::make_shared<EventChannel>(10000);
  GenerateRequest large{.prompt = text(1, 1000), .max_tokens = 20};
  ASSERT_TRUE(scheduler_.can_admit(large));
  scheduler_.admit({.request = std::move(large), .channel = channel});
  // 2 states and 16 blocks of each: 7,200 bytes, of 12,000.
  EXPECT_TRUE(scheduler_.can_admit({.prompt = text(2, 1000), .max_tokens = 20}));
  scheduler_.cancel_all(Finish::cancelled, Fault::device, "");
}

class SmallPool : public Pool {
 protected:
  SmallPool() : Pool(4 * kState + 20 * kBlock) {}
};

TEST_F(SmallPool, ARequestIsTakenUpOnlyIfStatesAndBlocksFitTogether) {
  auto channel = std::make_shared<EventChannel>(10000);
  scheduler_.admit({.request = {.prompt = text(1, 900), .max_tokens = 60}, .channel = channel});
  // 4 states and 15 blocks are promised with a second one of no tokens: 5 blocks are left.
  EXPECT_TRUE(scheduler_.can_admit({.prompt = text(2, 300), .max_tokens = 20}));
  EXPECT_FALSE(scheduler_.can_admit({.prompt = text(2, 300), .max_tokens = 21}));
  scheduler_.cancel_all(Finish::cancelled, Fault::device, "");
}

TEST_F(Pool, ShortMemoryIsGivenBackAndWhatRunsGoesOn) {
  for (unsigned i = 0; i < 8; ++i) ask(text(i, 100), std::to_string(i));
  const int64_t before = stats().resident_bytes;
  ASSERT_GT(before, 8 * kState);
  available_ = 1'000'000 - 2500;
  look_at_memory();
  EXPECT_LE(stats().resident_bytes, before - 2500);
  EXPECT_GE(stats().resident_bytes, before - 2500 - kState - 4 * kBlock) << "no more than was missing";
  EXPECT_GE(stats().given_back_bytes, 2500);

  available_ = 0;
  look_at_memory();
  EXPECT_EQ(stats().resident_bytes, 0);
  EXPECT_EQ(stats().n_cached_states, 0);
  ask(text(50, 1000));  // what was promised is had in any case

  available_ = 1'500'000;  // enough, but not so much that the cache may grow at once
  look_at_memory();
  available_ = 10'000'000;
  look_at_memory();
  for (unsigned i = 0; i < 8; ++i) ask(text(i, 100), std::to_string(i));
  EXPECT_GE(stats().resident_bytes, before);
  EXPECT_EQ(ask(text(7, 110)), 100);
}

TEST_F(Pool, UnknownMemoryChangesNothing) {
  ask(text(1, 100));
  const int64_t before = stats().resident_bytes;
  available_ = -1;
  look_at_memory();
  EXPECT_EQ(stats().resident_bytes, before);
}

TEST(Eviction, IsByWorkSavedPerByteThatIsGivenBack) {
  SlotPool<backend::StateSlot> states(4);
  KvBlockPool blocks(64);
  PrefixCache cache(kState, kBlock);
  const auto snapshot = [&](unsigned seed, int n_tokens) {
    Snapshot s{.tokens = text(seed, n_tokens)};
    s.state = std::move(*states.take());
    for (int i = 0; i < n_tokens; i += 64) s.blocks.push_back(std::move(*blocks.take()));
    return s;
  };
  // 3,000 tokens for 5,700 bytes, and 900 tokens for a state alone: whoever runs holds the blocks too.
  cache.insert(snapshot(1, 3000));
  Snapshot held = snapshot(2, 900);
  std::vector<KvBlock> holds;
  for (const KvBlock& block : held.blocks) holds.push_back(block.share(64));
  cache.insert(std::move(held));
  ASSERT_TRUE(cache.evict(Wanted::memory));
  EXPECT_TRUE(cache.contains(text(2, 900)));
  EXPECT_FALSE(cache.contains(text(1, 3000)));
  cache.clear();
  holds.clear();
}

TEST(Eviction, OfEqualBytesThatGoesWhichSavesLess) {
  SlotPool<backend::StateSlot> states(4);
  KvBlockPool blocks(64);
  PrefixCache cache(kState, kBlock);
  for (const int n : {100, 128}) {
    Snapshot s{.tokens = text(static_cast<unsigned>(n), n)};
    s.state = std::move(*states.take());
    for (int i = 0; i < n; i += 64) s.blocks.push_back(std::move(*blocks.take()));
    cache.insert(std::move(s));
  }
  ASSERT_TRUE(cache.evict(Wanted::memory));
  EXPECT_TRUE(cache.contains(text(128, 128)));
  cache.clear();
}

}  // namespace
}  // namespace lily::engine
