// docs/numerics.md, "What 'the same output' means": on which of chunks, threads, runs and neighbours a row's
// bits may depend, and on which not.
#include <gtest/gtest.h>

#include <cmath>

#include "engine/tolerance.h"
#include "tests/golden/golden_model.h"

namespace lily::engine {
namespace {

using plan::KvType;

std::vector<int32_t> text(size_t n) {
  const auto& ids = test::tiny_goldens().forced->ids;
  return {ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(n)};
}

// Logits of the last `n_rows` positions.
std::vector<std::vector<float>> last_rows(Executor& executor, const std::vector<int32_t>& ids, int chunk,
                                          int n_rows) {
  std::vector<std::vector<float>> rows;
  read_forced(
      executor, ids, chunk, static_cast<int64_t>(ids.size()) - n_rows,
      [&](int64_t, std::span<const float> logits) { rows.emplace_back(logits.begin(), logits.end()); });
  return rows;
}

TEST(Rules, ReferenceBitsDoNotDependOnChunks) {
  for (const KvType kv : {KvType::f32, KvType::int8}) {
    const auto executor = test::tiny_on("reference", kv).make_executor();
    const std::vector<int32_t> ids = text(70);
    const auto whole = last_rows(*executor, ids, 0, 2);
    for (const int chunk : {2, 63, 64, 65}) EXPECT_EQ(last_rows(*executor, ids, chunk, 2), whole) << chunk;
    const std::vector<int32_t> few = text(9);
    EXPECT_EQ(last_rows(*executor, few, 1, 2), last_rows(*executor, few, 0, 2));
  }
}

TEST(Rules, CpuLogitsOfDifferentChunksAreWithinTheTolerance) {
  LoadedModel& model = test::tiny_on("cpu", KvType::f32);
  const auto executor = model.make_executor();
  const std::vector<int32_t> ids = text(600);
  const auto whole = last_rows(*executor, ids, 0, 3);
  Precision once = precision_of("cpu", model.policy());
  const Precision precision = both(once, once);
  for (const int chunk : {1, 2, 63, 64, 65, 512}) {
    const auto rows = last_rows(*executor, ids, chunk, 3);
    ASSERT_EQ(rows.size(), 3u);
    for (size_t r = 0; r < rows.size(); ++r) {
      const double rms = root_mean_square(std::span(whole[r]).first(static_cast<size_t>(model.n_tokens())));
      const double tolerance = logit_tolerance(precision, model.dims(), rms);
      for (size_t i = 0; i < static_cast<size_t>(model.n_tokens()); ++i)
        ASSERT_NEAR(rows[r][i], whole[r][i], tolerance)
            << "chunks of " << chunk << ", row " << r << ", token " << i;
    }
  }
}

TEST(Rules, CpuBitsDoNotDependOnThreadsOrRuns) {
  const std::vector<int32_t> ids = text(200);
  std::vector<std::vector<float>> first;
  for (const int threads : {1, 2, 3}) {
    const auto model = test::load_tiny({.backend = "cpu", .threads = threads});
    const auto executor = model->make_executor();
    for (int run = 0; run < 2; ++run) {
      auto rows = last_rows(*executor, ids, 64, 4);
      if (first.empty()) first = std::move(rows);
      else EXPECT_EQ(rows, first) << threads << " threads, run " << run;
    }
  }
}

// One decode step of several sequences, each after a prompt of its own; the logits of sequence 0.
std::vector<float> beside(Executor& executor, int n_sequences) {
  const int n_prompt = 40;
  Step step;
  std::vector<backend::Segment> segments;
  std::vector<int32_t> tables, tokens, outputs;
  for (int s = 0; s < n_sequences; ++s) {
    step.clear();
    step.phase = plan::Phase::prefill;
    step.ending = plan::Ending::none;
    const auto& ids = test::tiny_goldens().forced->ids;
    step.tokens.assign(ids.begin() + 100 * s, ids.begin() + 100 * s + n_prompt);
    step.segments = {{.n_rows = n_prompt, .dst = backend::StateSlot{s}}};
    step.block_table = {s};
    executor.submit(step);
    executor.wait();
    segments.push_back({.first_row = s,
                        .n_rows = 1,
                        .position = n_prompt,
                        .src = backend::StateSlot{s},
                        .dst = backend::StateSlot{s},
                        .first_block = s});
    tables.push_back(s);
    tokens.push_back(ids[static_cast<size_t>(100 * s + n_prompt)]);
    outputs.push_back(s);
  }
  step = {.phase = plan::Phase::decode,
          .ending = plan::Ending::logits,
          .tokens = tokens,
          .segments = segments,
          .block_table = tables,
          .output_rows = outputs};
  executor.submit(step);
  const auto logits = executor.wait().logits.first(static_cast<size_t>(executor.limits().vocab));
  return {logits.begin(), logits.end()};
}

TEST(Rules, ADecodeRowDoesNotDependOnItsNeighbours) {
  for (const auto& [backend, kv] :
       {std::pair{"reference", KvType::f32}, std::pair{"cpu", KvType::f32}, std::pair{"cpu", KvType::int8}}) {
    LoadedModel& model = test::tiny_on(backend, kv);
    const auto executor = model.make_executor();
    const std::vector<float> alone = beside(*executor, 1);
    const int most = std::string(backend) == "cpu" ? std::min(8, model.policy().max_decode_rows) : 2;
    for (const int n : {2, 3, most})
      if (n <= most) EXPECT_EQ(beside(*executor, n), alone) << backend << ", " << n << " rows";
  }
}

TEST(Rules, SampledTextIsTheSameAloneAndBesideOthers) {
  LoadedModel& model = test::tiny_on("cpu", KvType::bf16);
  Engine engine(model.make_executor());
  const auto ask = [&](size_t i) {
    return engine.generate({.prompt = test::tiny_goldens().prompts[i].prompt,
                            .sampling = {.temperature = 1.5f, .top_p = 0.95f, .top_k = 20, .seed = 11},
                            .max_tokens = 24,
                            .keep_states = false});
  };
  std::vector<Generation> together;
  for (size_t i = 0; i < 4; ++i) together.push_back(ask(i));
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(greedy_output(std::move(together[i])), greedy_output(ask(i))) << i;
}

TEST(Rules, AResumedConversationReadsWhatAColdOneReads) {
  LoadedModel& model = test::tiny_on("cpu", KvType::f32);
  Engine engine(model.make_executor());
  const auto& stop_ids = test::tiny_checkpoint().config().stop_ids;
  const GoldenPrompt& golden = test::tiny_goldens().prompts[9];
  GenerateRequest half{
      .prompt = golden.prompt, .sampling = {.temperature = 0}, .stop_ids = stop_ids, .max_tokens = 5};
  half.prompt.resize(golden.prompt.size() / 2);
  greedy_output(engine.generate(std::move(half)));
  Generation warm = engine.generate({.prompt = golden.prompt,
                                     .sampling = {.temperature = 0},
                                     .stop_ids = stop_ids,
                                     .max_tokens = static_cast<int32_t>(golden.output.size())});
  std::vector<int32_t> ids;
  Finished finished;
  while (auto event = warm.next()) {
    if (const auto* token = std::get_if<Token>(&*event)) ids.push_back(token->id);
    if (const auto* end = std::get_if<Finished>(&*event)) finished = *end;
  }
  if (finished.stop_id >= 0) ids.push_back(finished.stop_id);
  // The first answer may happen to go on as the prompt does.
  EXPECT_GE(finished.usage.cached_tokens, static_cast<int32_t>(golden.prompt.size() / 2));
  EXPECT_LT(compare(ids, golden).divergence_margin, 0.02f);
}

}  // namespace
}  // namespace lily::engine
