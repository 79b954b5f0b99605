// How a step ends, on rows of logits that are hard: what is chosen must be what plan/sample.h says.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "backend/backend.h"
#include "backend/cpu/kernels/logits.h"
#include "model/checkpoint.h"
#include "plan/plan.h"
#include "plan/sample.h"
#include "tests/support/cpu_backends.h"
#include "tests/support/golden.h"

namespace lily::backend {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct NamedRow {
  std::string name;
  std::vector<float> logits;
};

std::vector<NamedRow> hard_rows(size_t n) {
  std::mt19937 random(static_cast<unsigned>(n));
  std::normal_distribution<float> normal(0, 5);
  std::vector<float> usual(n);
  for (float& x : usual) x = normal(random);
  std::vector<NamedRow> rows = {{"random", usual}, {"all equal", std::vector<float>(n, 1.5f)}};
  rows.push_back({"rising", usual});
  std::sort(rows.back().logits.begin(), rows.back().logits.end());
  rows.push_back({"falling", rows.back().logits});
  std::reverse(rows.back().logits.begin(), rows.back().logits.end());
  rows.push_back({"few values", usual});
  for (float& x : rows.back().logits) x = std::round(x);
  rows.push_back({"all largest in one chunk", usual});
  for (size_t i = 300; i < 380; ++i) rows.back().logits[i] += 100;
  rows.push_back({"NaN here and there", usual});
  for (size_t i = 0; i < n; i += 1 + random() % 200) rows.back().logits[i] = std::nanf("");
  rows.push_back({"nothing but NaN", std::vector<float>(n, std::nanf(""))});
  rows.push_back({"almost nothing is possible", std::vector<float>(n, -kInfinity)});
  for (size_t i = 0; i < 7; ++i) rows.back().logits[random() % n] = normal(random);
  rows.push_back({"an infinite one", usual});
  rows.back().logits[random() % n] = kInfinity;
  return rows;
}

// The last op of a step, on logits that are written for it.
class StepEnding : public testing::TestWithParam<std::string> {
 protected:
  struct Outcome {
    std::vector<int32_t> tokens, ids;
    std::vector<float> values, logsumexp;
  };
  StepEnding() : checkpoint_(model::Checkpoint::open(test::kTinyModel)) {
    device_ = make_device(GetParam(), {.threads = 2});
    device_->load(checkpoint_, {});
    device_->reserve({.n_state_slots = 1, .n_kv_blocks = 1, .n_token_slots = 1},
                     device_->policy(checkpoint_.dims()));
  }
  Outcome run(plan::Ending ending, std::vector<float> logits, const Sampling& sampling = {},
              int n_candidates = 64) {
    const plan::Shape shape{
        .phase = plan::Phase::decode, .rows = 1, .outputs = 1, .context = 64, .ending = ending};
    const auto program = device_->compile(plan::forward(
        checkpoint_.dims(), shape, device_->policy(checkpoint_.dims()), {.n_candidates = n_candidates}));
    const plan::Plan& plan = program->plan();
    const int32_t token = 1, row = 0, block = 0, n_tokens = static_cast<int32_t>(logits.size());
    const Segment segment{.n_rows = 1, .position = 0, .src = kNoState, .dst = StateSlot{0}};
    logits.resize(static_cast<size_t>(checkpoint_.dims().vocab), 1000.0f);  // padding: takes no part
    Outcome out;
    const auto finish = [&](plan::ValueId from, const auto& read) {
      program->write(from, logits);
      const auto n_ops = static_cast<int>(plan.ops.size());
      program->run_ops({.tokens = {&token, 1},
                        .segments = {&segment, 1},
                        .block_table = {&block, 1},
                        .output_rows = {&row, 1},
                        .sampling = {&sampling, 1},
                        .n_tokens = n_tokens},
                       n_ops - 1, n_ops);
      read();
    };
    const auto whole = [&](plan::ValueId id) {
      const std::vector<float> values = program->read(id);
      return std::vector<int32_t>(values.begin(), values.end());
    };
    std::visit(
        plan::overloaded{
            [&](const plan::GreedyToken& o) { finish(o.logits, [&] { out.tokens = whole(o.token); }); },
            [&](const plan::SampleToken& o) { finish(o.logits, [&] { out.tokens = whole(o.token); }); },
            [&](const plan::TopCandidates& o) {
              finish(o.logits, [&] {
                out.ids = whole(o.ids);
                out.values = program->read(o.values);
                out.logsumexp = program->read(o.logsumexp);
              });
            },
            [](const auto&) { FAIL() << "not how a step ends"; }},
        plan.ops.back());
    return out;
  }

  const model::Checkpoint checkpoint_;
  std::unique_ptr<Device> device_;
};

INSTANTIATE_TEST_SUITE_P(InstructionSets, StepEnding, testing::ValuesIn(test::cpu_backends()),
                         test::backend_test_name);

TEST_P(StepEnding, ChoosesWhatTheDefinitionChooses) {
  for (const size_t n : {8000u, 8192u, 2049u, 400u})
    for (const auto& [name, logits] : hard_rows(n)) {
      SCOPED_TRACE(testing::Message() << n << " logits, " << name);
      EXPECT_EQ(run(plan::Ending::greedy, logits).tokens, std::vector{plan::greedy_token(logits)});
      for (const int top_k : {1, 2, 20, 62, 63, 64, 100}) {
        const Sampling s{
            .temperature = 0.7f, .top_p = 0.95f, .top_k = top_k, .seed = n, .sequence = 3, .step = 9};
        EXPECT_EQ(run(plan::Ending::sampled, logits, s).tokens,
                  std::vector{plan::sample_token(logits, {0.7f, 0.95f, 0, top_k}, plan::uniform(n, 3, 9))})
            << "top-k " << top_k;
      }
    }
}

TEST_P(StepEnding, CandidatesAreTheFirstInOrder) {
  for (const size_t n : {8000u, 2049u, 400u})
    for (const auto& [name, logits] : hard_rows(n))
      for (const int n_candidates : {1, 16, 64, 128}) {
        SCOPED_TRACE(testing::Message() << n << " logits, " << name << ", " << n_candidates << " candidates");
        const Outcome out = run(plan::Ending::candidates, logits, {}, n_candidates);
        const auto expected = plan::top_candidates(logits, n_candidates);
        ASSERT_EQ(out.ids.size(), static_cast<size_t>(n_candidates));
        for (size_t i = 0; i < expected.size(); ++i) {
          EXPECT_EQ(out.ids[i], expected[i].id) << i;
          EXPECT_EQ(out.values[i], expected[i].logit) << i;
        }
        // Eight additions of a lane, four of lanes and the exponentials' own few units, relative to the sum;
        // the logarithm's rounding besides.
        const float sum = plan::logsumexp(logits);
        if (std::isinf(sum)) EXPECT_EQ(out.logsumexp[0], sum);
        else EXPECT_NEAR(out.logsumexp[0], sum, 0x1p-20 + 0x1p-23 * std::abs(sum));
      }
}

TEST(LogitScans, RaggedEndsAndNaN) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (const int64_t n : {1, 2, 15, 16, 17, 127, 128, 129, 255, 300, 2048}) {
    std::vector<float> logits(static_cast<size_t>(n));
    for (float& x : logits) x = random() % 8 == 0 ? std::nanf("") : normal(random);
    const auto n_chunks = static_cast<size_t>((n + cpu::kLogitChunk - 1) / cpu::kLogitChunk);
    std::vector<float> maxima(n_chunks + 1, -99.0f);
    cpu::chunk_maxima(logits.data(), n, maxima.data());
    float top = -kInfinity;
    double sum = 0;
    for (size_t chunk = 0; chunk < n_chunks; ++chunk) {
      float largest = -kInfinity;
      for (size_t i = chunk * 128; i < std::min<size_t>(chunk * 128 + 128, logits.size()); ++i)
        if (logits[i] > largest) largest = logits[i];
      EXPECT_EQ(maxima[chunk], largest) << n << " logits, chunk " << chunk;
      top = std::max(top, largest);
    }
    EXPECT_EQ(maxima[n_chunks], -99.0f) << "written behind the end";
    for (const float x : logits)
      if (!std::isnan(x)) sum += std::exp(double{x} - double{top});
    if (std::isinf(top)) continue;
    EXPECT_NEAR(cpu::sum_of_exponentials(logits.data(), n, top), sum, 1e-6 * sum) << n << " logits";
  }
}

}  // namespace
}  // namespace lily::backend
