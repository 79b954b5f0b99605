// The engine over a scripted executor: what it computes, in which order, and what it refuses.
#include "engine/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "tests/engine/engine_fixture.h"

namespace lily::engine {
namespace {

using std::chrono::milliseconds;

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
    request.branches = {static_cast<int32_t>(r % 30)};
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

TEST_P(EngineOf, AShortRequestDoesNotWaitBehindAllLongOnes) {
  const auto engine = make(limits(), {.max_sequences = 1});
  script->hold();
  Generation running = engine->generate(greedy(prompt_of(4, 0), 2));
  script->await_held();
  std::vector<Generation> all;
  for (uint64_t i = 1; i < 4; ++i) all.push_back(engine->generate(greedy(prompt_of(60, i), 2)));
  all.push_back(engine->generate(greedy(prompt_of(5, 4), 2)));
  script->allow(-1);
  read_all(running);
  for (Generation& g : all) read_all(g);
  std::vector<int> prompts;
  for (const auto& step : script->steps())
    if (step.phase == plan::Phase::prefill) prompts.push_back(step.rows[0]);
  EXPECT_EQ(prompts, (std::vector<int>{4, 60, 5, 60, 60}));
}

TEST_P(EngineOf, StoppingEndsWhatRunsAndWaitsAndTakesNoMore) {
  const auto engine = make(limits(), {.max_sequences = 1});
  script->hold();
  Generation running = engine->generate(greedy(prompt_of(4, 0), 50));
  script->await_held();
  Generation waiting = engine->generate(greedy(prompt_of(4, 1), 50));
  std::thread stopper([&] { engine->stop(); });
  // Refused as soon as the stop has begun, although the step in flight is still held.
  const auto is_refused = [&] {
    try {
      engine->generate(greedy(prompt_of(4, 2), 1)).cancel();
      return false;
    } catch (const Error&) {
      return true;
    }
  };
  while (!is_refused()) std::this_thread::yield();
  script->allow(-1);
  stopper.join();
  EXPECT_EQ(read_all(running).finished.finish, Finish::cancelled);
  EXPECT_EQ(read_all(waiting).finished.finish, Finish::cancelled);
  engine->clear_cache();  // waits for nobody
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

// A token is written into the state it was read from where nobody can want the one before it any more.
TEST_P(EngineOf, ATokensStateIsWrittenInPlaceUnlessItIsNeeded) {
  const auto in_place_of = [&](bool host_chooses, bool keep_states) {
    const auto engine = make();
    GenerateRequest request = greedy(prompt_of(20, 4), 6);
    request.keep_states = keep_states;
    if (host_chooses) request.top_logprobs = 3;
    const std::vector<int32_t> expected = expected_tokens(request);
    EXPECT_EQ(read_all(engine->generate(std::move(request))).ids, expected);
    std::vector<bool> in_place;
    for (const auto& step : script->steps())
      if (step.phase == plan::Phase::decode) in_place.push_back(step.in_place.at(0));
    if (limits().depth > 1) in_place.resize(5);  // there may be a step more than tokens
    return in_place;
  };
  const std::vector<bool> never(5, false);
  if (limits().depth > 1) {
    EXPECT_EQ(in_place_of(false, false), never) << "a step ahead may be void";
    return;
  }
  EXPECT_EQ(in_place_of(false, false), std::vector<bool>(5, true));
  EXPECT_EQ(in_place_of(false, true), (std::vector<bool>{false, true, true, true, true}))
      << "the state after the prompt is remembered";
  EXPECT_EQ(in_place_of(true, false), never) << "candidates may not be enough";
}

}  // namespace
}  // namespace lily::engine
