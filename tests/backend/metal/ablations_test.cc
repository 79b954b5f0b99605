// The default policy and each ablation over the whole tiny model: 256 teacher-forced tokens and six answers,
// against the outputs of an independent implementation.
//
// The forced tokens are read as a conversation is: most of them in prompt chunks, the last ones by decode
// steps, so that the mechanisms of both phases take part. scripts/metal-goldens runs all goldens.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>

#include "backend/metal/lower.h"
#include "engine/device_executor.h"
#include "engine/evaluate.h"
#include "engine/goldens.h"
#include "plan/sample.h"
#include "tests/backend/metal/rig.h"
#include "tests/support/golden.h"
#include "text/tokenizer.h"

namespace lily {
namespace {

using plan::Mechanism;
using plan::Policy;

constexpr int kForced = 256, kDecoded = 32;  // tokens; of these the last ones by decode steps
// So that the prompt is more than one chunk, and one chunk without P5.
constexpr int kChunkRows = 96;
constexpr int kContext = 512;
// Short ones with an answer of nine tokens and more, one of them in three messages: 173 tokens to read, 63 to
// choose.
constexpr int kPrompts[] = {4, 6, 14, 18, 19, 21};

// The bounds of the whole goldens are 0.5 % in perplexity over 2,047 predictions and a margin under 0.5 where
// tokens may part. Over fewer predictions errors of single ones, which are independent, weigh more.
const double kPerplexityBound = 0.005 * std::sqrt(2047.0 / (kForced - 1));
constexpr float kMargin = 0.5f;

struct Outcome {
  double perplexity = 0;      // over the tokens after the first
  std::vector<float> logits;  // of all forced tokens
  std::vector<std::vector<int32_t>> answers;
};

class Ablations : public testing::TestWithParam<std::optional<Mechanism>> {
 protected:
  static void SetUpTestSuite() {
    metal_ = new test::EmulatedMetal(test::make_emulated_metal(test::tiny_checkpoint()));
    n_tokens_ = text::Tokenizer::load(test::kTinyModel).n_tokens();
    goldens_ = new engine::Goldens(engine::load_goldens(test::kTinyGoldens, n_tokens_));
    whole_ = nullptr;
  }
  static void TearDownTestSuite() {
    delete whole_;
    delete goldens_;
    delete metal_;
  }

  static model::Dims dims() { return test::tiny_checkpoint().dims(); }
  static Policy default_policy() {
    Policy policy = metal_->device->policy(dims());
    policy.max_chunk_rows = kChunkRows;
    return policy;
  }
  static const engine::GoldenForced& forced() { return *goldens_->forced; }

  static std::unique_ptr<engine::DeviceExecutor> executor(const Policy& policy) {
    const engine::MemoryPlan memory =
        engine::plan_memory(dims(), policy, 0, 0, {.context = kContext, .max_sequences = 1});
    return std::make_unique<engine::DeviceExecutor>(*metal_->device, dims(), policy, memory, n_tokens_);
  }

  static Outcome run(const Policy& policy) {
    Outcome outcome;
    const auto keep = [&](std::span<const float> row) {
      outcome.logits.insert(outcome.logits.end(), row.begin(), row.begin() + n_tokens_);
    };
    {
      const auto steps = executor(policy);
      const std::span ids = std::span(forced().ids).first(kForced);
      engine::read_forced(*steps, ids.first(kForced - kDecoded), 0, 0,
                          [&](int64_t, std::span<const float> row) { keep(row); });
      engine::Step step{.phase = plan::Phase::decode, .ending = plan::Ending::logits, .output_rows = {0}};
      step.block_table.resize(kContext / backend::kKvBlockTokens);
      std::iota(step.block_table.begin(), step.block_table.end(), 0);
      for (int position = kForced - kDecoded; position < kForced; ++position) {
        step.tokens = {ids[static_cast<size_t>(position)]};
        step.segments = {
            {.n_rows = 1, .position = position, .src = backend::StateSlot{0}, .dst = backend::StateSlot{0}}};
        steps->submit(step);
        keep(steps->wait().logits);
      }
    }
    double sum = 0;
    for (int p = 0; p + 1 < kForced; ++p) {
      const std::span<const float> row = row_of(outcome, p);
      double exp_sum = 0;
      for (const float x : row) exp_sum += std::exp(static_cast<double>(x));
      sum += std::log(exp_sum) - row[static_cast<size_t>(forced().ids[static_cast<size_t>(p) + 1])];
    }
    outcome.perplexity = std::exp(sum / (kForced - 1));

    engine::Engine engine(executor(policy), {.max_sequences = 1});
    for (const int i : kPrompts) {
      const engine::GoldenPrompt& golden = goldens_->prompts.at(static_cast<size_t>(i));
      outcome.answers.push_back(
          engine::greedy_output(engine.generate({.prompt = golden.prompt,
                                                 .sampling = {.temperature = 0},
                                                 .stop_ids = test::tiny_checkpoint().config().stop_ids,
                                                 .max_tokens = static_cast<int32_t>(golden.output.size()),
                                                 .keep_states = false})));
    }
    return outcome;
  }

  static std::vector<std::string> kernels_of(const plan::Shape& shape, const Policy& policy) {
    std::vector<std::string> kernels;
    for (const metal::LoweredOp& op : metal::lower(plan::forward(dims(), shape, policy)).ops)
      for (const metal::Dispatch& dispatch : op.dispatches) kernels.push_back(dispatch.kernel);
    return kernels;
  }

  static std::span<const float> row_of(const Outcome& outcome, int position) {
    const auto n = static_cast<size_t>(n_tokens_);
    return std::span(outcome.logits).subspan(static_cast<size_t>(position) * n, n);
  }

  // With the default policy; computed once.
  static const Outcome& whole() {
    if (whole_ == nullptr) whole_ = new Outcome(run(default_policy()));
    return *whole_;
  }

  static void expect_golden(const Outcome& got) {
    double nll = 0;
    for (int p = 0; p + 1 < kForced; ++p) nll += forced().nll[static_cast<size_t>(p)];
    const double golden = std::exp(nll / (kForced - 1));
    EXPECT_NEAR(got.perplexity, golden, kPerplexityBound * golden);
    int n_top = 0, n_same = 0;
    for (size_t k = 0; k < forced().positions.size() && forced().positions[k] < kForced; ++k) {
      const size_t first = k * static_cast<size_t>(forced().n_top);
      const float margin = forced().top_logits[first] - forced().top_logits[first + 1];
      const int32_t top = plan::greedy_token(row_of(got, forced().positions[k]));
      ++n_top;
      n_same += top == forced().top_ids[first];
      if (margin >= kMargin) EXPECT_EQ(top, forced().top_ids[first]) << "position " << forced().positions[k];
    }
    size_t n_exact = 0;
    for (size_t i = 0; i < got.answers.size(); ++i) {
      const engine::GreedyComparison c =
          engine::compare(got.answers[i], goldens_->prompts.at(static_cast<size_t>(kPrompts[i])));
      n_exact += c.exact;
      EXPECT_LT(c.divergence_margin, kMargin) << "prompt " << kPrompts[i] << ", step " << c.n_agreed;
    }
    EXPECT_GE(10 * n_exact, 8 * std::size(kPrompts));
    fmt::print("perplexity off by {:.3f} %, same top token at {} of {}, {} of {} answers whole\n",
               100 * (got.perplexity / golden - 1), n_same, n_top, n_exact, std::size(kPrompts));
  }

  static inline test::EmulatedMetal* metal_ = nullptr;
  static inline const engine::Goldens* goldens_ = nullptr;
  static inline int32_t n_tokens_ = 0;
  static inline const Outcome* whole_ = nullptr;
};

TEST_P(Ablations, AgreesWithTheGoldens) {
  if (!GetParam()) return expect_golden(whole());
  const Mechanism off = *GetParam();
  Policy policy = default_policy();
  if (off == Mechanism::d7) {
    // Contexts as short as these have the general path anyway: here the other one is what is new.
    policy.fixed_blocks_from_context = 1;
    const plan::Shape decode{.phase = plan::Phase::decode, .context = kContext};
    EXPECT_NE(kernels_of(decode, policy), kernels_of(decode, default_policy()));
    EXPECT_EQ(kernels_of(decode, *plan::without(policy, off)), kernels_of(decode, default_policy()));
  } else {
    policy = *plan::without(policy, off);
  }
  const Outcome got = run(policy);
  expect_golden(got);
  switch (off) {
    case Mechanism::p2:
    case Mechanism::d2:
    case Mechanism::d3:
    case Mechanism::d5:
    case Mechanism::d6: {  // work is re-arranged, no sum is another
      EXPECT_EQ(got.answers, whole().answers);
      ASSERT_EQ(got.logits.size(), whole().logits.size());
      EXPECT_EQ(std::memcmp(got.logits.data(), whole().logits.data(), got.logits.size() * sizeof(float)), 0);
      break;
    }
    default:
      break;
  }
}

std::vector<std::optional<Mechanism>> all_of_them() {
  std::vector<std::optional<Mechanism>> all = {std::nullopt};
  for (int m = 0; m < plan::kMechanisms; ++m) all.emplace_back(static_cast<Mechanism>(m));
  return all;
}

INSTANTIATE_TEST_SUITE_P(Off, Ablations, testing::ValuesIn(all_of_them()), [](const auto& test) {
  return test.param ? std::string(plan::name(*test.param)) : std::string("None");
});

}  // namespace
}  // namespace lily
