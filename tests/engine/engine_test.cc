// The engine over a scripted executor: what it computes, in which order, and what happens when things go
// wrong.
#include "engine/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <new>
#include <random>
#include <set>
#include <thread>

#include "engine/scheduler.h"
#include "tests/engine/scripted_executor.h"

namespace lily::engine {
namespace {

using std::chrono::milliseconds;

std::vector<int32_t> prompt_of(int n, uint64_t seed) {
  std::vector<int32_t> prompt;
  for (int i = 0; i < n; ++i)
    prompt.push_back(static_cast<int32_t>(mix(seed * 1000 + static_cast<uint64_t>(i)) % 100));
  return prompt;
}

GenerateRequest greedy(std::vector<int32_t> prompt, int max_tokens) {
  return {.prompt = std::move(prompt), .sampling = {.temperature = 0}, .max_tokens = max_tokens};
}

// What a model without engine would write.
std::vector<int32_t> expected_tokens(const GenerateRequest& request, int max_context = 512) {
  std::vector<int32_t> tokens = request.prompt, output;
  Sampler sampler(request.sampling, request.prompt, 100);
  const int limit =
      request.max_tokens > 0 ? static_cast<int>(tokens.size()) + request.max_tokens : max_context;
  while (static_cast<int>(tokens.size()) < limit) {
    const int32_t id = sampler.choose(logits_of(tokens, 104), nullptr, static_cast<uint32_t>(output.size()));
    sampler.accept(id);
    if (std::count(request.stop_ids.begin(), request.stop_ids.end(), id) > 0) break;
    tokens.push_back(id);
    output.push_back(id);
  }
  return output;
}

struct Answer {
  std::vector<int32_t> ids;
  std::vector<Token> tokens;
  Finished finished;
  int n_progress = 0;
};

Answer read_all(Generation& generation) {
  Answer answer;
  while (auto event = generation.next()) {
    if (auto* token = std::get_if<Token>(&*event)) {
      answer.ids.push_back(token->id);
      answer.tokens.push_back(*token);
    } else if (auto* finished = std::get_if<Finished>(&*event)) {
      answer.finished = *finished;
    } else {
      ++answer.n_progress;
    }
  }
  return answer;
}

// A place is given back a moment after the reader has its last event.
void await_idle(const Engine& engine) {
  while (engine.stats().n_running + engine.stats().n_waiting > 0)
    std::this_thread::sleep_for(milliseconds(1));
}

Answer read_all(Generation&& generation) { return read_all(generation); }

// Both with and without a step that runs ahead of the host.
class EngineOf : public testing::TestWithParam<int> {
 protected:
  Limits limits() const {
    Limits limits = ScriptedExecutor::small();
    limits.depth = GetParam();
    return limits;
  }
  // Keeps a pointer to the executor that the engine owns.
  std::unique_ptr<Engine> make(const Limits& limits, const EngineOptions& options = {}) {
    auto executor = std::make_unique<ScriptedExecutor>(limits);
    script = executor.get();
    return std::make_unique<Engine>(std::move(executor), options);
  }
  std::unique_ptr<Engine> make() { return make(limits()); }

  ScriptedExecutor* script = nullptr;
};

INSTANTIATE_TEST_SUITE_P(Depth, EngineOf, testing::Values(1, 2),
                         [](const auto& depth) { return "Depth" + std::to_string(depth.param); });

TEST_P(EngineOf, WritesWhatTheModelWouldWrite) {
  const auto engine = make();
  for (const int n : {1, 2, 63, 64, 65, 128, 200}) {
    const GenerateRequest request = greedy(prompt_of(n, static_cast<uint64_t>(n)), 20);
    const std::vector<int32_t> expected = expected_tokens(request);
    const Answer answer = read_all(engine->generate(greedy(request.prompt, 20)));
    EXPECT_EQ(answer.ids, expected) << n << " prompt tokens";
    EXPECT_EQ(answer.finished.finish, Finish::length);
    EXPECT_EQ(answer.finished.usage.prompt_tokens, n);
    EXPECT_EQ(answer.finished.usage.completion_tokens, 20);
    EXPECT_EQ(answer.finished.stop_id, -1);
  }
}

TEST_P(EngineOf, StopTokenEndsAndIsNotPartOfTheText) {
  const auto engine = make();
  GenerateRequest request = greedy(prompt_of(10, 1), 50);
  const std::vector<int32_t> unstopped = expected_tokens(request);
  const int32_t stop = unstopped[7];
  const auto first = std::find(unstopped.begin(), unstopped.end(), stop);
  request.stop_ids = {stop, 99};
  const Answer answer = read_all(engine->generate(std::move(request)));
  EXPECT_EQ(answer.ids, std::vector<int32_t>(unstopped.begin(), first));
  EXPECT_EQ(answer.finished.finish, Finish::stop);
  EXPECT_EQ(answer.finished.stop_id, stop);
  EXPECT_EQ(answer.finished.usage.completion_tokens, first - unstopped.begin() + 1);
}

TEST_P(EngineOf, AStopTokenRightAfterThePromptGivesAnEmptyAnswer) {
  const auto engine = make();
  GenerateRequest request = greedy(prompt_of(5, 2), 50);
  request.stop_ids = {expected_tokens(request)[0]};
  const Answer answer = read_all(engine->generate(std::move(request)));
  EXPECT_TRUE(answer.ids.empty());
  EXPECT_EQ(answer.finished.finish, Finish::stop);
}

TEST_P(EngineOf, TheContextEndsATextWithoutLimit) {
  Limits small = limits();
  small.max_context = 70;
  const auto engine = make(small);
  const GenerateRequest request = greedy(prompt_of(60, 3), 0);
  const Answer answer = read_all(engine->generate(greedy(request.prompt, 0)));
  EXPECT_EQ(answer.ids, expected_tokens(request, 70));
  EXPECT_EQ(answer.ids.size(), 10u);
  EXPECT_EQ(answer.finished.finish, Finish::length);
}

TEST_P(EngineOf, SampledTextIsTheSameAloneAndInABatch) {
  const auto engine = make();
  const auto request = [](int i) {
    GenerateRequest r{.prompt = prompt_of(20 + i, static_cast<uint64_t>(i)),
                      .sampling = {.temperature = 1, .top_p = 0.95f, .top_k = 20, .seed = 5},
                      .max_tokens = 30};
    if (i % 3 == 1) r.sampling.presence_penalty = 1.5f;  // the host chooses
    if (i % 3 == 2) r.sampling.temperature = 0;
    return r;
  };
  std::vector<Generation> together;
  for (int i = 0; i < 6; ++i) together.push_back(engine->generate(request(i)));
  for (int i = 0; i < 6; ++i) {
    const std::vector<int32_t> expected = expected_tokens(request(i));
    EXPECT_EQ(read_all(together[static_cast<size_t>(i)]).ids, expected) << i;
    EXPECT_EQ(read_all(engine->generate(request(i))).ids, expected) << i;
  }
}

TEST_P(EngineOf, WholeLogitsAreFetchedWhenCandidatesAreNotEnough) {
  const auto engine = make();
  // A bias that can lift tokens which are not candidates, and often does not.
  GenerateRequest request = greedy(prompt_of(30, 4), 40);
  for (int32_t id = 0; id < 3; ++id) request.sampling.logit_bias.emplace_back(id, 3.0f);
  GenerateRequest same = greedy(request.prompt, 40);
  same.sampling = request.sampling;
  EXPECT_EQ(read_all(engine->generate(std::move(request))).ids, expected_tokens(same));
  const auto steps = script->steps();
  const auto ended_in = [&](plan::Ending ending) {
    return std::count_if(steps.begin(), steps.end(), [&](const auto& s) { return s.ending == ending; });
  };
  EXPECT_GT(ended_in(plan::Ending::logits), 0);
  EXPECT_GT(ended_in(plan::Ending::candidates), 0);
}

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

TEST_P(EngineOf, ManyConversationsAtOnce) {
  Limits tight = limits();
  tight.n_state_slots = 13;
  tight.n_kv_blocks = 24;
  const auto engine = make(tight, {.max_sequences = 4, .queue_capacity = 1000});
  std::mt19937 random(10);
  std::vector<GenerateRequest> copies;
  std::vector<Generation> generations;
  const auto make_request = [](uint32_t r) {
    GenerateRequest request =
        greedy(prompt_of(1 + static_cast<int>(r % 150), r % 4), 1 + static_cast<int>(r % 23));
    request.session = r % 2 ? "s" + std::to_string(r % 3) : "";
    request.n_stable = static_cast<int32_t>(std::min<size_t>(r % 90, request.prompt.size() - 1));
    if (r % 5 == 0) request.sampling = {.temperature = 1, .top_k = 10, .repetition_penalty = 1.2f, .seed = r};
    if (r % 5 == 1) request.sampling = {.temperature = 1, .seed = r};
    if (r % 5 == 2) request.sampling = {.temperature = 1, .top_k = 10, .seed = r};
    return request;
  };
  for (int i = 0; i < 200; ++i) {
    const uint32_t r = random();
    copies.push_back(make_request(r));
    generations.push_back(engine->generate(make_request(r)));
    if (i % 7 == 3) generations.back().cancel();
  }
  for (size_t i = 0; i < generations.size(); ++i) {
    const Answer answer = read_all(generations[i]);
    const std::vector<int32_t> expected = expected_tokens(copies[i]);
    if (i % 7 == 3) {
      ASSERT_LE(answer.ids.size(), expected.size());
      EXPECT_TRUE(std::equal(answer.ids.begin(), answer.ids.end(), expected.begin()));
    } else {
      ASSERT_EQ(answer.ids, expected) << i;
      EXPECT_EQ(answer.finished.finish, Finish::length);
    }
  }
  engine->clear_cache();
  EXPECT_EQ(engine->stats().n_free_blocks, tight.n_kv_blocks);
  EXPECT_EQ(engine->stats().n_free_states, tight.n_state_slots);
}

TEST_P(EngineOf, PromptChunksAlternateWithTokensOfOthers) {
  const auto engine = make(limits(), {.max_sequences = 2, .shared_chunk_rows = 16});
  script->hold();
  Generation writer = engine->generate(greedy(prompt_of(3, 1), 60));
  script->await_held();
  Generation reader = engine->generate(greedy(prompt_of(200, 2), 1));
  script->allow(-1);
  const Answer a = read_all(writer), b = read_all(reader);
  EXPECT_EQ(a.ids.size(), 60u);
  const auto steps = script->steps();
  int longest = 0, streak = 0, chunks = 0;
  for (const auto& step : steps) {
    const bool chunk = step.phase == plan::Phase::prefill && step.rows[0] != 3;
    chunks += chunk;
    streak = chunk ? streak + 1 : 0;
    longest = std::max(longest, streak);
    if (chunk) EXPECT_LE(step.rows[0], 16);
  }
  EXPECT_EQ(chunks, 13);
  EXPECT_EQ(longest, 1) << "no prompt chunk follows another while somebody waits for a token";
}

TEST_P(EngineOf, DecodeStepsTakeSeveralSequences) {
  const auto engine = make(limits(), {.max_sequences = 4});
  script->hold();
  std::vector<Generation> all;
  for (uint64_t i = 0; i < 4; ++i) all.push_back(engine->generate(greedy(prompt_of(4, i), 40)));
  script->await_held();
  script->allow(-1);
  for (auto& g : all) EXPECT_EQ(read_all(g).ids.size(), 40u);
  const auto steps = script->steps();
  EXPECT_TRUE(std::any_of(steps.begin(), steps.end(), [](const auto& s) { return s.rows.size() == 4; }));
  EXPECT_LT(steps.size(), 4u * 40u / 2);
}

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
    EXPECT_EQ(answer.finished.error, std::bad_alloc().what());
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
  while (engine->stats().n_running + engine->stats().n_waiting > 0)
    std::this_thread::sleep_for(milliseconds(1));
  const Answer answer = read_all(slow);
  EXPECT_EQ(answer.finished.finish, Finish::cancelled);
  EXPECT_LE(answer.ids.size(), 10u);
  EXPECT_EQ(answer.finished.usage.completion_tokens, static_cast<int32_t>(answer.ids.size()) + 1);
}

TEST_P(EngineOf, AFullQueueRefuses) {
  const auto engine = make(limits(), {.max_sequences = 1, .queue_capacity = 2});
  script->hold();
  Generation running = engine->generate(greedy(prompt_of(4, 0), 5));
  script->await_held();
  Generation first = engine->generate(greedy(prompt_of(4, 1), 5));
  Generation second = engine->generate(greedy(prompt_of(4, 2), 5));
  EXPECT_THROW(engine->generate(greedy(prompt_of(4, 3), 5)), QueueFull);
  first.cancel();  // makes room
  Generation third = engine->generate(greedy(prompt_of(4, 3), 5));
  script->allow(-1);
  EXPECT_EQ(read_all(running).ids.size(), 5u);
  EXPECT_EQ(read_all(first).finished.finish, Finish::cancelled);
  EXPECT_EQ(read_all(second).ids.size(), 5u);
  EXPECT_EQ(read_all(third).ids.size(), 5u);
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

TEST_P(EngineOf, RequestsThatCannotBeServedAreRefusedAtOnce) {
  const auto engine = make();
  const auto message = [&](GenerateRequest request) -> std::string {
    try {
      engine->generate(std::move(request));
    } catch (const Error& e) {
      EXPECT_EQ(e.fault(), Fault::user);
      return e.what();
    }
    return "accepted";
  };
  EXPECT_NE(message({}).find("empty"), std::string::npos);
  EXPECT_NE(message({.prompt = {1, 100}}).find("token 1 of the prompt is 100"), std::string::npos);
  EXPECT_NE(message({.prompt = {-1}}).find("-1"), std::string::npos);
  EXPECT_NE(message({.prompt = {1}, .max_tokens = -2}).find("max_tokens is -2"), std::string::npos);
  EXPECT_NE(message({.prompt = {1}, .top_logprobs = 21}).find("21"), std::string::npos);
  EXPECT_NE(message({.prompt = {1}, .sampling = {.top_p = 2}}).find("top_p"), std::string::npos);
  try {
    engine->generate(greedy(prompt_of(500, 1), 13));
    FAIL();
  } catch (const ContextExceeded& e) {
    EXPECT_EQ(e.n_prompt, 500);
    EXPECT_EQ(e.n_max_tokens, 13);
    EXPECT_EQ(e.n_context, 512);
    EXPECT_NE(std::string(e.what()).find("500"), std::string::npos);
  }
  EXPECT_EQ(read_all(engine->generate(greedy(prompt_of(500, 1), 12))).ids.size(), 12u);
}

// Allows multiples of three only, and throws when told to.
class Threes final : public TokenConstraint {
 public:
  explicit Threes(int fail_at, bool forbid_all = false) : fail_at_(fail_at), forbid_all_(forbid_all) {}
  bool allowed(TokenMask& mask) override {
    if (n_ == fail_at_) fail(Fault::user, "the grammar has a hole");
    for (int32_t id = 0; id < mask.n_tokens() && !forbid_all_; id += 3) mask.allow(id);
    return n_ % 2 == 0 || forbid_all_;  // every other token is free
  }
  void accept(int32_t) override { ++n_; }

 private:
  const int fail_at_;
  const bool forbid_all_;
  int n_ = 0;
};

TEST_P(EngineOf, AConstraintIsAskedBeforeEachToken) {
  const auto engine = make();
  GenerateRequest request = greedy(prompt_of(20, 3), 30);
  request.constraint = std::make_unique<Threes>(-1);
  const Answer answer = read_all(engine->generate(std::move(request)));
  ASSERT_EQ(answer.ids.size(), 30u);
  std::vector<int32_t> prefix = prompt_of(20, 3);
  for (size_t i = 0; i < 30; ++i) {
    std::vector<float> z = logits_of(prefix, 100);
    if (i % 2 == 0)
      for (size_t id = 0; id < z.size(); ++id)
        if (id % 3 != 0) z[id] = -100;
    EXPECT_EQ(answer.ids[i], plan::greedy_token(z)) << i;
    prefix.push_back(answer.ids[i]);
  }
}

// Free for a while, then multiples of three for a while, and so on; can be asked for single tokens.
class Sometimes final : public TokenConstraint {
 public:
  bool allowed(TokenMask& mask) override {
    if (is_free()) return false;
    for (int32_t id = 0; id < mask.n_tokens(); id += 3) mask.allow(id);
    return true;
  }
  bool is_free() const override { return n_ % 10 < 6; }
  bool can_ask_single() const override { return true; }
  bool allows(int32_t token) override { return token % 3 == 0; }
  void accept(int32_t) override { ++n_; }
  StopDetail detail() const override { return StopDetail::loop; }

 private:
  int n_ = 0;
};

TEST_P(EngineOf, TheDeviceChoosesWhileAConstraintIsFree) {
  const auto engine = make();
  GenerateRequest request = greedy(prompt_of(20, 3), 40);
  request.constraint = std::make_unique<Sometimes>();
  const Answer answer = read_all(engine->generate(std::move(request)));
  ASSERT_EQ(answer.ids.size(), 40u);
  EXPECT_EQ(answer.finished.detail, StopDetail::loop);
  std::vector<int32_t> prefix = prompt_of(20, 3);
  for (size_t i = 0; i < 40; ++i) {
    std::vector<float> z = logits_of(prefix, 100);
    if (i % 10 >= 6)
      for (size_t id = 0; id < z.size(); ++id)
        if (id % 3 != 0) z[id] = -100;
    EXPECT_EQ(answer.ids[i], plan::greedy_token(z)) << i;
    prefix.push_back(answer.ids[i]);
  }
  int n_device = 0;
  for (const auto& step : script->steps()) n_device += step.ending == plan::Ending::greedy ? 1 : 0;
  EXPECT_GE(n_device, 24) << "four rounds of six tokens, the first of them from the prompt";
}

// Sampled, alone and beside a sequence that needs whole logits in each step.
TEST_P(EngineOf, AConstrainedTextIsTheSameInCompany) {
  const auto request = [](std::unique_ptr<TokenConstraint> constraint) {
    GenerateRequest r = greedy(prompt_of(20, 3), 30);
    r.sampling = {.temperature = 1, .top_k = 20, .seed = 5};
    r.constraint = std::move(constraint);
    r.keep_states = false;
    return r;
  };
  const auto engine = make();
  const Answer alone = read_all(engine->generate(request(std::make_unique<Sometimes>())));
  GenerateRequest hungry = greedy(prompt_of(21, 9), 60);
  hungry.sampling = {.temperature = 1, .top_k = 0, .seed = 6};
  Generation other = engine->generate(std::move(hungry));
  const Answer beside = read_all(engine->generate(request(std::make_unique<Sometimes>())));
  read_all(std::move(other));
  EXPECT_EQ(alone.ids, beside.ids);
  EXPECT_EQ(alone.ids.size(), 30u);
}

TEST_P(EngineOf, WhatAConstraintThrowsEndsItsRequest) {
  const auto engine = make();
  GenerateRequest request = greedy(prompt_of(20, 3), 30);
  request.constraint = std::make_unique<Threes>(4);
  const Answer answer = read_all(engine->generate(std::move(request)));
  EXPECT_EQ(answer.ids.size(), 4u);
  EXPECT_EQ(answer.finished.finish, Finish::error);
  EXPECT_EQ(answer.finished.fault, Fault::user);
  EXPECT_EQ(answer.finished.error, "the grammar has a hole");
  GenerateRequest nothing = greedy(prompt_of(20, 3), 30);
  nothing.constraint = std::make_unique<Threes>(-1, true);
  EXPECT_NE(read_all(engine->generate(std::move(nothing))).finished.error.find("no token may come next"),
            std::string::npos);
}

TEST_P(EngineOf, LogprobsComeWithTheTokens) {
  const auto engine = make();
  GenerateRequest request = greedy(prompt_of(20, 4), 5);
  request.top_logprobs = 3;
  const Answer answer = read_all(engine->generate(std::move(request)));
  ASSERT_EQ(answer.tokens.size(), 5u);
  std::vector<int32_t> prefix = prompt_of(20, 4);
  for (const Token& token : answer.tokens) {
    const std::vector<float> z = logits_of(prefix, 100);
    EXPECT_NEAR(token.logprob, z[static_cast<size_t>(token.id)] - plan::logsumexp(z), 1e-5);
    ASSERT_EQ(token.top.size(), 3u);
    EXPECT_EQ(token.top[0].id, token.id) << "greedy";
    prefix.push_back(token.id);
  }
}

TEST_P(EngineOf, ProgressAndTimingsTellOfThePrompt) {
  const auto engine = make();
  Generation generation = engine->generate(greedy(prompt_of(200, 5), 3));
  int32_t last = 0;
  std::optional<Finished> finished;
  while (auto event = generation.next()) {
    if (const auto* p = std::get_if<PromptProgress>(&*event)) {
      EXPECT_GT(p->n_done, last);
      EXPECT_EQ(p->n_total, 200);
      last = p->n_done;
    }
    if (const auto* f = std::get_if<Finished>(&*event)) finished = *f;
  }
  EXPECT_EQ(last, 200);
  ASSERT_TRUE(finished);
  EXPECT_GE(finished->timings.prefill_ms, 0);
  EXPECT_NEAR(finished->timings.ttft_ms, finished->timings.queued_ms + finished->timings.prefill_ms, 1e-9);
  EXPECT_TRUE(generation.done());
  EXPECT_FALSE(generation.next()) << "nothing comes after Finished";
  EXPECT_FALSE(generation.next_for(milliseconds(1)));
}

TEST_P(EngineOf, StatesOfAPrivateRequestAreNotKept) {
  const auto engine = make();
  GenerateRequest request = greedy(prompt_of(100, 1), 5);
  request.keep_states = false;
  read_all(engine->generate(std::move(request)));
  EXPECT_EQ(engine->stats().n_cached_states, 0);
  EXPECT_EQ(read_all(engine->generate(greedy(prompt_of(100, 1), 5))).finished.usage.cached_tokens, 0);
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
