// Memory that states and KV blocks share: what is where, that what is promised is had however the blocks lie,
// and the scheduler over it.
#include "engine/places.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "engine/scheduler.h"
#include "tests/engine/engine_fixture.h"
#include "tests/engine/scripted_executor.h"

namespace lily::engine {
namespace {

TEST(Places, ABlockGoesWhereFewestAreVacant) {
  Places places(4, 3, 1);
  std::vector<int32_t> blocks;
  for (int i = 0; i < 7; ++i) blocks.push_back(places.take_block().value());
  EXPECT_EQ(places.n_with_blocks(), 3);
  EXPECT_EQ(places.n_free(), 1);
  places.free_block(blocks[0]);  // the first place has one vacancy, the third has two
  EXPECT_EQ(places.take_block().value() / 3, blocks[0] / 3);
  places.free_block(blocks[6]);
  EXPECT_EQ(places.n_free(), 2) << "nothing lies in the third place any more";
  places.check_integrity();
}

TEST(Places, SomeAreForStatesAlone) {
  Places places(5, 2, 3);
  std::vector<int32_t> blocks;
  while (const auto block = places.take_block()) blocks.push_back(*block);
  EXPECT_EQ(blocks.size(), 4u);
  std::set<int32_t> states;
  while (const auto state = places.take_state()) states.insert(*state);
  EXPECT_EQ(states.size(), 3u);
  for (const int32_t block : blocks) EXPECT_FALSE(states.contains(block / 2));
  // Where no blocks lie there may be more states.
  for (const int32_t block : blocks) places.free_block(block);
  EXPECT_TRUE(places.take_state());
  EXPECT_TRUE(places.take_state());
  EXPECT_FALSE(places.take_block());
  places.check_integrity();
}

// Against a model that knows only who lies where.
TEST(Places, TakenAndGivenUpAtRandomAreWhatASimpleModelSays) {
  std::mt19937 random(7);
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  for (int round = 0; round < 60; ++round) {
    const int n_places = 1 + static_cast<int>(below(9)), n_each = 1 + static_cast<int>(below(6));
    const int n_for_states = static_cast<int>(below(static_cast<size_t>(n_places) + 1));
    Places places(n_places, n_each, n_for_states);
    std::vector<int32_t> states, blocks;
    for (int i = 0; i < 400; ++i) {
      std::map<int32_t, int> n_blocks;
      for (const int32_t b : blocks) ++n_blocks[b / n_each];
      const int n_free = n_places - static_cast<int>(states.size() + n_blocks.size());
      ASSERT_EQ(places.n_free(), n_free);
      ASSERT_EQ(places.n_with_blocks(), static_cast<int>(n_blocks.size()));
      const size_t what = below(i / 100 % 2 == 0 ? 6 : 3);  // grows, shrinks, ...
      if (what == 0 && !states.empty()) {
        const auto at = states.begin() + static_cast<std::ptrdiff_t>(below(states.size()));
        places.free_state(*at);
        states.erase(at);
      } else if (what <= 2 && !blocks.empty()) {
        const auto at = blocks.begin() + static_cast<std::ptrdiff_t>(below(blocks.size()));
        places.free_block(*at);
        blocks.erase(at);
      } else if (what == 3) {
        const auto state = places.take_state();
        ASSERT_EQ(state.has_value(), n_free > 0);
        if (!state) continue;
        ASSERT_FALSE(n_blocks.contains(*state));
        ASSERT_EQ(std::count(states.begin(), states.end(), *state), 0);
        states.push_back(*state);
      } else if (what > 3) {
        int fullest = 0;
        for (const auto& [place, n] : n_blocks)
          if (n < n_each) fullest = std::max(fullest, n);
        const bool may_begin = n_free > 0 && std::ssize(n_blocks) < n_places - n_for_states;
        const auto block = places.take_block();
        ASSERT_EQ(block.has_value(), fullest > 0 || may_begin);
        if (!block) continue;
        ASSERT_EQ(std::count(blocks.begin(), blocks.end(), *block), 0);
        ASSERT_EQ(std::count(states.begin(), states.end(), *block / n_each), 0);
        ASSERT_EQ(n_blocks[*block / n_each], fullest);
        blocks.push_back(*block);
      }
      places.check_integrity();
      const int32_t any = static_cast<int32_t>(below(static_cast<size_t>(n_places * n_each)));
      ASSERT_EQ(places.is_block(any), std::count(blocks.begin(), blocks.end(), any) == 1);
      ASSERT_EQ(places.is_state(any / n_each), std::count(states.begin(), states.end(), any / n_each) == 1);
    }
  }
}

// Two kinds of holders: those who were promised what they take, and others who give up all they have.
TEST(Places, WhatIsPromisedIsHadHoweverTheBlocksLie) {
  std::mt19937 random(11);
  constexpr int kPlaces = 8, kEach = 4, kForStates = 3;
  int n_scattered = 0;
  for (int round = 0; round < 200; ++round) {
    Places places(kPlaces, kEach, kForStates);
    std::vector<int32_t> states, blocks, others_states, others_blocks;
    for (int i = 0; i < 200; ++i) {
      switch (random() % 7) {
        case 0:
          if (const auto state = places.take_state()) others_states.push_back(*state);
          break;
        case 1:
        case 2:
          if (const auto block = places.take_block()) others_blocks.push_back(*block);
          break;
        case 3: {
          if (blocks.empty()) break;
          std::swap(blocks[random() % blocks.size()], blocks.back());
          places.free_block(blocks.back());
          blocks.pop_back();
          break;
        }
        default:
          if (const auto block = places.take_block();
              block && std::ssize(blocks) < (kPlaces - kForStates) * kEach)
            blocks.push_back(*block);
          else if (block) places.free_block(*block);
      }
    }
    for (const int32_t state : others_states) places.free_state(state);
    for (const int32_t block : others_blocks) places.free_block(block);
    n_scattered += places.n_with_blocks() * kEach >= std::ssize(blocks) + kEach ? 1 : 0;
    while (std::ssize(states) < kForStates) states.push_back(places.take_state().value());
    while (std::ssize(blocks) < (kPlaces - kForStates) * kEach) blocks.push_back(places.take_block().value());
    places.check_integrity();
  }
  EXPECT_GT(n_scattered, 20) << "places that fewer blocks could do without were in use";
}

// ---- The scheduler over them

constexpr int kEach = 4;  // blocks in the place of a state

Limits in_places(int n_places, int depth, int n_for_states) {
  Limits l = ScriptedExecutor::small();
  l.depth = depth;
  l.block_bytes = 100;
  l.state_bytes = kEach * l.block_bytes;
  l.blocks_per_state = kEach;
  l.n_state_slots = n_places;
  l.n_kv_blocks = n_places * kEach;
  l.n_state_places = n_for_states;
  return l;
}

class InPlaces : public testing::TestWithParam<int> {
 protected:
  static constexpr int kTogether = 3;
  int n_for_states() const { return kTogether * (GetParam() + 1); }

  // One of max_context tokens, 8 blocks, needs two places beside those for states.
  void make(int n_places_beside) {
    scheduler_.reset();
    executor_.emplace(in_places(n_for_states() + n_places_beside, GetParam(), n_for_states()));
    scheduler_.emplace(*executor_, EngineOptions{.max_sequences = kTogether, .state_interval = 100});
  }

  struct Running {
    std::vector<int32_t> expected;
    std::shared_ptr<EventChannel> channel;
  };
  Running admit(GenerateRequest request) {
    Running running{.expected = expected_tokens(request), .channel = std::make_shared<EventChannel>(1000)};
    scheduler_->admit({.request = std::move(request), .channel = running.channel, .arrived = Clock::now()});
    return running;
  }
  bool step() {
    const bool more = scheduler_->advance();
    scheduler_->check_integrity();
    return more;
  }
  static int32_t read(const Running& running) {
    std::vector<int32_t> ids;
    while (auto event = running.channel->next(Clock::now())) {
      if (const auto* token = std::get_if<Token>(&*event)) ids.push_back(token->id);
      if (const auto* end = std::get_if<Finished>(&*event)) {
        EXPECT_NE(end->finish, Finish::error) << end->error;
        if (end->finish != Finish::cancelled) EXPECT_EQ(ids, running.expected);
        return end->usage.cached_tokens;
      }
    }
    ADD_FAILURE() << "no end";
    return 0;
  }
  int32_t ask(const std::vector<int32_t>& prompt) {
    GenerateRequest request = greedy(prompt, 3);
    EXPECT_TRUE(scheduler_->can_admit(request));
    const Running running = admit(std::move(request));
    while (step()) {
    }
    return read(running);
  }
  EngineStats stats() const {
    EngineStats stats;
    scheduler_->report(stats);
    return stats;
  }

  std::optional<ScriptedExecutor> executor_;
  std::optional<Scheduler> scheduler_;
};

TEST_P(InPlaces, ManyShortPromptsHaveStatesAndALongOneHasTheirPlaces) {
  make(6);
  for (unsigned i = 0; i < 12; ++i) ask(prompt_of(40, i));
  EXPECT_GE(stats().n_cached_states, n_for_states() + 1) << "more than without those of blocks";
  EXPECT_EQ(ask(prompt_of(500, 100)), 0);
  EXPECT_GE(stats().n_blocks - stats().n_free_blocks, 8);
  EXPECT_LE(stats().resident_bytes, stats().pool_bytes);
  EXPECT_EQ(stats().pool_bytes, executor_->limits().n_state_slots * executor_->limits().state_bytes);
  EXPECT_EQ(ask(prompt_of(506, 100)), 500);
}

TEST_P(InPlaces, SequencesOfTheWholeContextFitWithNothingToSpare) {
  make(2 * kTogether);
  std::vector<Running> running;
  for (int i = 0; i < kTogether; ++i) {
    GenerateRequest request = greedy(prompt_of(450, static_cast<uint64_t>(i)), 62);
    ASSERT_TRUE(scheduler_->can_admit(request));
    running.push_back(admit(std::move(request)));
  }
  EXPECT_FALSE(scheduler_->can_admit(greedy(prompt_of(10, 9), 1)));
  while (step()) {
  }
  for (const Running& r : running) EXPECT_EQ(read(r), 0);
  EXPECT_EQ(stats().n_failed, 0);
}

TEST_P(InPlaces, MoreBlocksThanThePlacesHoldAreNotPromised) {
  make(3);  // 12 blocks; a request of the whole context is 8 of them
  const Running first = admit(greedy(prompt_of(450, 1), 62));
  EXPECT_TRUE(scheduler_->can_admit(greedy(prompt_of(200, 2), 56)));
  EXPECT_FALSE(scheduler_->can_admit(greedy(prompt_of(200, 2), 57)));
  while (step()) {
  }
  read(first);
  EXPECT_TRUE(scheduler_->can_admit(greedy(prompt_of(200, 2), 57))) << "what the cache has is no hindrance";
}

// Conversations that grow, go back, and end in between, over caches of all sizes: nothing that was promised
// is ever missing (a LILY_CHECK), nothing is waited for in vain, and every state and block that is read holds
// what was written for it.
TEST_P(InPlaces, AnythingAtOnceIsAnsweredRightly) {
  std::mt19937 random(5u + static_cast<unsigned>(GetParam()));
  int64_t n_evicted = 0, n_cached = 0;
  for (const int n_beside : {2, 3, 4, 6, 9, 16}) {
    make(n_beside);
    std::vector<std::vector<int32_t>> told(5);
    std::vector<Running> running;
    int n_asked = 0;
    for (int i = 0; i < 4000 && !HasFailure(); ++i) {
      if (n_asked < 120 && random() % 3 == 0) {
        std::vector<int32_t>& prompt = told[random() % told.size()];
        if (random() % 4 == 0) prompt.resize(random() % (prompt.size() + 1));
        for (const int32_t id : prompt_of(1 + static_cast<int>(random() % 150), random() % 50))
          prompt.push_back(id);
        if (prompt.size() > 470) prompt.resize(1 + random() % 200);
        GenerateRequest request = greedy(prompt, 1 + static_cast<int>(random() % 40));
        if (random() % 2 == 0) request.session = std::to_string(&prompt - told.data());
        if (random() % 2 == 0) request.top_logprobs = 1;  // the host chooses
        if (scheduler_->can_admit(request)) {
          ++n_asked;
          running.push_back(admit(std::move(request)));
          if (random() % 8 == 0) running.back().channel->cancel();
        } else {
          ASSERT_GT(scheduler_->n_running(), 0) << "nothing runs, and it does not fit";
        }
      }
      if (!step() && n_asked == 120) break;
    }
    while (step()) {
    }
    EXPECT_EQ(n_asked, 120);
    for (const Running& r : running) n_cached += read(r);
    n_evicted += stats().cache_evictions;
    EXPECT_EQ(stats().n_failed, 0);
    scheduler_->clear_cache();
    scheduler_->check_integrity();
    EXPECT_EQ(stats().resident_bytes, 0);
  }
  EXPECT_GT(n_evicted, 300);
  EXPECT_GT(n_cached, 10'000);
}

INSTANTIATE_TEST_SUITE_P(Depth, InPlaces, testing::Values(1, 2));

}  // namespace
}  // namespace lily::engine
