// Arg max, candidates and the sampler over vocabularies of several sizes, the real one included, against the
// reference: ids and tokens are the same, but for draws at the edge between two tokens, and logsumexp is
// within what fp32 sums may lose.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "backend/metal/lower.h"
#include "plan/sample.h"
#include "tests/backend/metal/rig.h"

namespace lily {
namespace {

using backend::Sampling;
using plan::Ending;
using plan::ValueId;

// Rows of logits; ids from n_tokens on are padding, here with the largest values of all.
std::vector<float> rows_of(int n_rows, int vocab, int n_tokens, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> logits(static_cast<size_t>(n_rows) * static_cast<size_t>(vocab));
  for (float& x : logits) x = 3 * normal(random);
  const auto at = [&](int row, int id) -> float& {
    return logits[static_cast<size_t>(row) * static_cast<size_t>(vocab) + static_cast<size_t>(id)];
  };
  for (int row = 0; row < n_rows; ++row) {
    // The largest twice, far apart: the lower id wins. The last real id is among the first ones.
    at(row, n_tokens / 3) = at(row, n_tokens - 2) = 20;
    at(row, n_tokens - 1) = 19;
    for (int id = n_tokens; id < vocab; ++id) at(row, id) = 100;
  }
  return logits;
}

class Endings : public testing::Test {
 protected:
  static void SetUpTestSuite() { make_devices({}); }
  static void make_devices(const test::EmulatedOptions& options) {
    metal_ = new test::EmulatedMetal(test::make_emulated_metal(test::small_checkpoint(), options));
    reference_ = backend::make_reference_device({}).release();
    reference_->load(test::small_checkpoint(), {});
    reference_->reserve({.n_state_slots = 8, .n_kv_blocks = 8, .n_token_slots = 8},
                        reference_->policy(test::small_checkpoint().dims()));
  }
  static void TearDownTestSuite() {
    delete metal_;
    delete reference_;
  }

  void expect_same(const plan::Plan& plan, const std::vector<float>& logits, int n_tokens,
                   const std::vector<Sampling>& sampling = {}) {
    const int n = plan.shape.outputs;
    std::vector<test::Sequence> sequences(static_cast<size_t>(n), {.tokens = {0}});
    for (int i = 0; i < n; ++i) sequences[static_cast<size_t>(i)].dst = backend::StateSlot{i};
    test::Inputs inputs(sequences, 1, n_tokens);
    inputs.sampling() = sampling;
    const auto metal = metal_->device->compile(plan), reference = reference_->compile(plan);
    for (backend::Program* program : {metal.get(), reference.get()}) {
      program->write(ValueId{0}, logits);
      program->run_ops(inputs.get(), 0, 1);
    }
    for (size_t v = 1; v < plan.values.size(); ++v) {
      const ValueId id{static_cast<int>(v)};
      const auto expected = reference->read(id), got = metal->read(id);
      ASSERT_EQ(expected.size(), got.size());
      for (size_t i = 0; i < expected.size(); ++i) {
        if (plan.values[v].name == "sum") EXPECT_NEAR(got[i], expected[i], 1e-5f * std::abs(expected[i]));
        else if (!sampling.empty() && got[i] != expected[i])
          expect_near_edge(std::span(logits).subspan(i * static_cast<size_t>(plan.dims.vocab),
                                                     static_cast<size_t>(n_tokens)),
                           sampling[i], static_cast<int32_t>(got[i]), static_cast<int32_t>(expected[i]));
        else ASSERT_EQ(got[i], expected[i]) << plan.values[v].name << " " << i;
      }
    }
  }

  // A draw so near to the edge between two tokens that fp32 sums decide: of a thread's terms one after the
  // other, 256 threads share a row.
  static void expect_near_edge(std::span<const float> logits, const Sampling& s, int32_t got,
                               int32_t expected) {
    const auto tolerance = static_cast<float>(std::ldexp(static_cast<double>(logits.size()) / 256 + 16, -23));
    const plan::SampleSettings settings{s.temperature, s.top_p, s.min_p, s.top_k};
    const float u = plan::uniform(s.seed, s.sequence, s.step);
    const auto logit = [&](int32_t id) { return logits[static_cast<size_t>(id)]; };
    const float below = logit(plan::sample_token(logits, settings, std::min(u + tolerance, 1 - 0x1p-24f)));
    const float above = logit(plan::sample_token(logits, settings, std::max(u - tolerance, 0.0f)));
    EXPECT_LE(below, logit(got)) << "token " << got << " for " << expected;
    EXPECT_GE(above, logit(got)) << "token " << got << " for " << expected;
  }

  static inline test::EmulatedMetal* metal_ = nullptr;
  static inline backend::Device* reference_ = nullptr;
};

class Vocabulary : public Endings, public testing::WithParamInterface<int> {};

class VocabularyTraced : public Endings {
 protected:
  static void SetUpTestSuite() { make_devices({.traced = true, .seed = 1}); }
};

TEST_P(Vocabulary, ArgMaxIsTheReferences) {
  const int vocab = GetParam(), n_tokens = vocab - 7;
  for (const int n : {1, 3})
    expect_same(test::ending_plan(Ending::greedy, vocab, n, 0), rows_of(n, vocab, n_tokens, 1), n_tokens);
}

TEST_P(Vocabulary, CandidatesAreTheReferences) {
  const int vocab = GetParam(), n_tokens = vocab - 7;
  for (const int n_candidates : {1, 20, 64})
    expect_same(test::ending_plan(Ending::candidates, vocab, 2, n_candidates), rows_of(2, vocab, n_tokens, 2),
                n_tokens);
}

TEST_P(Vocabulary, SampledTokensAreTheReferences) {
  const int vocab = GetParam(), n_tokens = vocab - 7;
  // Among ranked logits, among the whole vocabulary, and arg max, in one step.
  const std::vector<Sampling> rows = {
      {.top_k = 20, .seed = 3, .step = 1},
      {.temperature = 0.7f, .top_p = 0.8f, .min_p = 0.02f, .top_k = 40, .seed = 3, .sequence = 1, .step = 7},
      {.temperature = 4, .seed = 4, .sequence = 2, .step = 2},
      {.temperature = 5, .top_p = 0.9f, .seed = 5},
      {.temperature = 6, .min_p = 0.01f, .seed = 6, .step = 9},
      {.temperature = 0, .top_k = 5}};
  for (const uint64_t seed : {1, 2}) {
    std::vector<Sampling> drawn = rows;
    for (Sampling& s : drawn) s.step += static_cast<uint32_t>(seed);
    const int n = static_cast<int>(rows.size());
    expect_same(test::ending_plan(Ending::sampled, vocab, n, 0), rows_of(n, vocab, n_tokens, seed), n_tokens,
                drawn);
  }
  expect_same(test::ending_plan(Ending::sampled, vocab, 1, 0), rows_of(1, vocab, n_tokens, 3), n_tokens,
              {rows[0]});
}

// All kernels of the endings in the traced build, also the one that ranks what more than one threadgroup has
// left: a finding would end the step.
TEST_F(VocabularyTraced, EveryKernelIsClean) {
  constexpr int kVocab = 70'000, kTokens = kVocab - 7;
  const std::vector<float> logits = rows_of(2, kVocab, kTokens, 1);
  expect_same(test::ending_plan(Ending::greedy, kVocab, 2, 0), logits, kTokens);
  expect_same(test::ending_plan(Ending::candidates, kVocab, 2, 20), logits, kTokens);
  expect_same(test::ending_plan(Ending::sampled, kVocab, 2, 0), logits, kTokens,
              {{.top_k = 20, .seed = 3}, {.temperature = 4, .top_p = 0.9f, .min_p = 0.01f, .seed = 4}});
  EXPECT_TRUE(metal_->gpu->findings().empty());
}

INSTANTIATE_TEST_SUITE_P(Sizes, Vocabulary, testing::Values(100, 512, 8192, 8193, 248320));

}  // namespace
}  // namespace lily
