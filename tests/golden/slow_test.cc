// The reference backend on everything: minutes of scalar arithmetic, so not part of the default suite.
#include <gtest/gtest.h>

#include "tests/golden/golden_model.h"

namespace lily::engine {
namespace {

TEST(Reference, PerplexityAndTopTokens) {
  const auto executor = test::tiny_on("reference", plan::KvType::f32).make_executor();
  const GoldenForced& golden = *test::tiny_goldens().forced;
  const ForcedReport report = compare(score(*executor, golden.ids, golden.positions), golden);
  EXPECT_EQ(report.predictions, 2047);
  EXPECT_NEAR(report.perplexity_ratio(), 1, 5e-5);
  EXPECT_GE(report.top1_agreement, 190);
  EXPECT_LT(report.max_abs_logit_error, 1e-3);
}

TEST(Reference, AnswersEveryPromptAsTheGoldens) {
  Engine engine(test::tiny_on("reference", plan::KvType::f32).make_executor());
  const auto& prompts = test::tiny_goldens().prompts;
  const GreedyReport report = run_greedy(engine, prompts, test::tiny_checkpoint().config().stop_ids);
  EXPECT_LT(report.first_divergence_margin_max, 0.02f);
  EXPECT_GE(static_cast<double>(report.exact), 0.95 * static_cast<double>(report.prompts));
}

TEST(Reference, FindsTheNeedleInALongPrompt) {
  LoadOptions options{.backend = "reference"};
  options.memory.context = 5824;
  const auto model = test::load_tiny(options);
  Engine engine(model->make_executor());
  const std::vector<GoldenPrompt> prompt = {*test::tiny_goldens().long_prompt};
  EXPECT_EQ(run_greedy(engine, prompt, test::tiny_checkpoint().config().stop_ids).exact, 1);
}

}  // namespace
}  // namespace lily::engine
