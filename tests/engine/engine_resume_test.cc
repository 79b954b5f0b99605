// The engine over a scripted executor: what it still knows of earlier requests.
#include <gtest/gtest.h>

#include <random>

#include "tests/engine/engine_fixture.h"

namespace lily::engine {
namespace {

TEST_P(EngineOf, ALongerPromptOfTheConversationResumes) {
  const auto engine = make();
  std::vector<int32_t> conversation = prompt_of(100, 5);
  int32_t known = 0;
  for (int turn = 0; turn < 4; ++turn) {
    GenerateRequest request = greedy(conversation, 9);
    request.session = "chat";
    const std::vector<int32_t> expected = expected_tokens(request);
    const Answer answer = read_all(engine->generate(std::move(request)));
    EXPECT_EQ(answer.ids, expected) << "turn " << turn;
    EXPECT_EQ(answer.finished.usage.cached_tokens, known) << "turn " << turn;
    conversation.insert(conversation.end(), answer.ids.begin(), answer.ids.end());
    known = static_cast<int32_t>(conversation.size()) - 1;  // the last token was never fed
    for (const int32_t id : prompt_of(13, static_cast<uint64_t>(100 + turn))) conversation.push_back(id);
  }
  EXPECT_EQ(script->n_copies(), 0) << "an append-only conversation needs no copy of KV";
}

TEST_P(EngineOf, AnEditedPromptResumesWhereItStillAgrees) {
  const auto engine = make();
  // 70 tokens that stay, then two different endings, then the first one again.
  const std::vector<int32_t> stable = prompt_of(70, 6);
  for (const uint64_t ending : {1, 2, 1, 3}) {
    GenerateRequest request = greedy(stable, 12);
    for (const int32_t id : prompt_of(30, ending)) request.prompt.push_back(id);
    request.n_stable = 70;
    const std::vector<int32_t> expected = expected_tokens(request);
    const Answer answer = read_all(engine->generate(std::move(request)));
    EXPECT_EQ(answer.ids, expected);
    if (ending != 1) EXPECT_EQ(answer.finished.usage.cached_tokens, 70);
    if (ending != 1) {
      ASSERT_TRUE(answer.finished.miss);
      EXPECT_GE(answer.finished.miss->position, 70);
    }
  }
  EXPECT_GT(script->n_copies(), 0) << "the second block is shared up to its sixth position only";
}

TEST_P(EngineOf, WherePromptsPartForTheSecondTimeAStateIsKept) {
  const auto engine = make();
  const std::vector<int32_t> common = prompt_of(150, 6);
  int32_t n_cached = -1;
  for (const uint64_t ending : {1, 2, 3, 4, 5}) {
    GenerateRequest request = greedy(common, 4);
    // The token after the common ones is another one each time.
    for (const int32_t id : prompt_of(80, 10 + ending))
      request.prompt.push_back((id + static_cast<int32_t>(ending)) % 100);
    request.prompt[150] = static_cast<int32_t>(ending);
    const std::vector<int32_t> expected = expected_tokens(request);
    const Answer answer = read_all(engine->generate(std::move(request)));
    EXPECT_EQ(answer.ids, expected);
    n_cached = answer.finished.usage.cached_tokens;
    EXPECT_EQ(n_cached, ending <= 3 ? 0 : 150) << "prompt " << ending;
  }
}

TEST_P(EngineOf, AStateIsKeptWhereTheCallerSaysThatPromptsPart) {
  const auto engine = make();
  GenerateRequest request = greedy(prompt_of(300, 6), 4);
  request.branches = {10, 70, 90, 200, 260};  // 10, 90 and 260 are too near to be worth a chunk
  request.n_stable = 280;
  read_all(engine->generate(std::move(request)));
  std::vector<int> rows;
  for (const auto& step : script->steps())
    if (step.phase == plan::Phase::prefill) rows.push_back(step.rows[0]);
  EXPECT_EQ(rows, (std::vector<int>{64, 6, 64, 64, 2, 64, 16, 20}));
  const std::pair<int, int> cached_of_agreeing[] = {{69, 0}, {75, 70}, {195, 70}, {250, 200}, {285, 280}};
  for (const auto& [n_agreeing, n_cached] : cached_of_agreeing) {
    std::vector<int32_t> prompt = prompt_of(300, 6);
    prompt[static_cast<size_t>(n_agreeing)] = (prompt[static_cast<size_t>(n_agreeing)] + 1) % 100;
    GenerateRequest other = greedy(prompt, 1);
    other.keep_states = false;
    EXPECT_EQ(read_all(engine->generate(std::move(other))).finished.usage.cached_tokens, n_cached)
        << n_agreeing;
  }
}

TEST_P(EngineOf, InsideALongPromptStatesAreKeptNowAndThenWithoutStepsOfTheirOwn) {
  const auto engine = make(limits(), {.state_interval = 100});
  read_all(engine->generate(greedy(prompt_of(400, 6), 1)));
  EXPECT_EQ(script->steps().size(), 7u) << "chunks of 64 tokens";
  await_idle(*engine);
  EXPECT_EQ(engine->stats().n_cached_states, 3 + 1) << "after 128, 256 and 384 tokens and at the end";
  std::vector<int32_t> prompt = prompt_of(400, 6);
  prompt[300] = (prompt[300] + 1) % 100;
  GenerateRequest request = greedy(prompt, 4);
  const std::vector<int32_t> expected = expected_tokens(request);
  const Answer answer = read_all(engine->generate(std::move(request)));
  EXPECT_EQ(answer.ids, expected);
  EXPECT_EQ(answer.finished.usage.cached_tokens, 256);
}

TEST_P(EngineOf, ForgetsAnOldConversationBeforeItRunsOutOfMemory) {
  Limits tight = limits();
  tight.n_state_slots = 7;
  tight.n_kv_blocks = 10;
  tight.max_context = 320;
  const auto engine = make(tight, {.max_sequences = 2});
  std::mt19937 random(9);
  for (int i = 0; i < 60; ++i) {
    GenerateRequest request = greedy(prompt_of(20 + static_cast<int>(random() % 200), random() % 5), 10);
    const std::vector<int32_t> expected = expected_tokens(request);
    ASSERT_EQ(read_all(engine->generate(std::move(request))).ids, expected) << i;
  }
  EXPECT_GT(engine->stats().cache_hits, 0);
  engine->clear_cache();
  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.n_free_blocks, stats.n_blocks);
  EXPECT_EQ(stats.n_free_states, stats.n_states);
  EXPECT_EQ(stats.n_cached_states, 0);
}

// All blocks are promised to the one sequence, and the block in the middle of which it would go on is relied
// on by what the first answer left.
TEST_P(EngineOf, APrefixThatNoFreeBlockAllowsToResumeIsReadAgain) {
  Limits tight = limits();
  tight.max_context = 128;
  tight.n_kv_blocks = 2;
  const auto engine = make(tight, {.max_sequences = 1});
  const std::vector<int32_t> prompt = prompt_of(70, 1);
  EXPECT_EQ(read_all(engine->generate(greedy(prompt, 31))).ids, expected_tokens(greedy(prompt, 31)));
  std::vector<int32_t> other = prompt;
  other.push_back((expected_tokens(greedy(prompt, 1))[0] + 1) % 100);
  const Answer answer = read_all(engine->generate(greedy(other, 20)));
  EXPECT_EQ(answer.finished.finish, Finish::length) << answer.finished.error;
  EXPECT_EQ(answer.ids, expected_tokens(greedy(other, 20)));
  EXPECT_EQ(answer.finished.usage.cached_tokens, 0);
  engine->clear_cache();
  EXPECT_EQ(engine->stats().cache_hits, 0);
  EXPECT_EQ(engine->stats().cache_misses, 2);
  EXPECT_EQ(engine->stats().n_free_blocks, 2);
}

TEST_P(EngineOf, StatesOfAPrivateRequestAreNotKept) {
  const auto engine = make();
  GenerateRequest request = greedy(prompt_of(100, 1), 5);
  request.keep_states = false;
  read_all(engine->generate(std::move(request)));
  EXPECT_EQ(engine->stats().n_cached_states, 0);
  EXPECT_EQ(read_all(engine->generate(greedy(prompt_of(100, 1), 5))).finished.usage.cached_tokens, 0);
}

}  // namespace
}  // namespace lily::engine
