#include "plan/sample.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>

namespace lily::plan {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(Philox, MatchesThePublishedVectors) {
  // Known-answer vectors of the Random123 distribution for philox4x32-10.
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, UniformNumbersFillTheUnitInterval) {
  double sum = 0;
  for (uint32_t step = 0; step < 10000; ++step) {
    const float u = uniform(7, 3, step);
    ASSERT_GE(u, 0.0f);
    ASSERT_LT(u, 1.0f);
    sum += u;
  }
  EXPECT_NEAR(sum / 10000, 0.5, 5 / std::sqrt(12.0 * 10000));
}

TEST(Greedy, TakesTheLowestIdOnTies) {
  EXPECT_EQ(greedy_token(std::vector<float>{1, 3, 3, 2}), 1);
  EXPECT_EQ(greedy_token(std::vector<float>{std::nanf(""), -kInf, -5}), 2);
}

TEST(Candidates, AreSortedByLogitThenId) {
  const auto top = top_candidates(std::vector<float>{1, 3, 2, 3, -kInf}, 3);
  ASSERT_EQ(top.size(), 3u);
  EXPECT_EQ(top[0].id, 1);
  EXPECT_EQ(top[1].id, 3);
  EXPECT_EQ(top[2].id, 2);
}

TEST(Logsumexp, IsStableForLargeLogits) {
  EXPECT_NEAR(logsumexp(std::vector<float>{1000, 1000}), 1000 + std::log(2.0), 1e-4);
  EXPECT_EQ(logsumexp(std::vector<float>{-kInf, -kInf}), -kInf);
}

// The definition, written the slow way: probabilities of every token after each filter.
std::map<int32_t, double> distribution(const std::vector<float>& logits, const SampleSettings& s) {
  std::vector<std::pair<double, int32_t>> p;
  for (size_t i = 0; i < logits.size(); ++i)
    p.emplace_back(logits[i] / s.temperature, static_cast<int32_t>(i));
  std::sort(p.begin(), p.end(),
            [](auto& a, auto& b) { return a.first != b.first ? a.first > b.first : a.second < b.second; });
  if (s.top_k > 0 && p.size() > static_cast<size_t>(s.top_k)) p.resize(static_cast<size_t>(s.top_k));
  double sum = 0;
  for (auto& [x, id] : p) sum += std::exp(x);
  for (auto& [x, id] : p) x = std::exp(x) / sum;
  double prefix = 0;
  size_t n = 0;
  while (n < p.size() && (n == 0 || prefix < s.top_p)) prefix += p[n++].first;
  if (s.top_p < 1) p.resize(n);
  std::map<int32_t, double> kept;
  double total = 0;
  for (auto& [x, id] : p)
    if (x >= s.min_p * p[0].first) total += kept[id] = x;
  for (auto& [id, x] : kept) x /= total;
  return kept;
}

TEST(Sample, DrawsFromTheDefinedDistribution) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal(0, 2);
  for (const SampleSettings& s : {SampleSettings{}, SampleSettings{.temperature = 0.6f, .top_p = 0.8f},
                                  SampleSettings{.temperature = 1.5f, .top_k = 5},
                                  SampleSettings{.top_p = 0.95f, .min_p = 0.1f, .top_k = 20}}) {
    std::vector<float> logits(40);
    for (float& x : logits) x = normal(random);
    const auto expected = distribution(logits, s);
    std::map<int32_t, int> count;
    const int n_draws = 1 << 16;  // evenly spread draws give each token its probability to within two steps
    for (int i = 0; i < n_draws; ++i)
      ++count[sample_token(logits, s, (static_cast<float>(i) + 0.5f) / n_draws)];
    for (const auto& [id, n] : count) EXPECT_TRUE(expected.count(id)) << id;
    for (const auto& [id, p] : expected) EXPECT_NEAR(count[id], p * n_draws, 2.0) << id;
  }
}

TEST(Sample, AtLeastOneTokenIsKept) {
  EXPECT_EQ(sample_token(std::vector<float>{0, 5, 1}, {.top_p = 1e-6f}, 0.999f), 1);
  EXPECT_EQ(sample_token(std::vector<float>{0, 5, 1}, {.min_p = 1.0f}, 0.999f), 1);
  EXPECT_EQ(sample_token(std::vector<float>{0, 5, 1}, {.top_k = 1}, 0.999f), 1);
}

TEST(Sample, MaskedTokensAreNeverDrawn) {
  const std::vector<float> logits = {-kInf, 0, -kInf, 0};
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(sample_token(logits, {}, static_cast<float>(i) / 1000) % 2, 1);
}

TEST(Sample, WithoutTopKTheOrderGivenDoesNotMatter) {
  std::mt19937 random(17);
  std::normal_distribution<float> normal(0, 2);
  std::uniform_real_distribution<float> between(0, 1);
  for (int row = 0; row < 300; ++row) {
    std::vector<Candidate> some(1 + random() % 5000);
    std::vector<float> logits;
    for (size_t i = 0; i < some.size(); ++i) {
      const float logit = random() % 16 == 0 ? -kInf : std::round(normal(random) * 8) / 8;  // many are equal
      logits.push_back(i == 0 ? 0 : logit);
      some[i] = {static_cast<int32_t>(i), logits[i]};
    }
    const SampleSettings s{.temperature = 0.1f + 2 * between(random),
                           .top_p = row % 3 == 0 ? 1 : between(random),
                           .min_p = row % 2 == 0 ? 0 : between(random) / 10};
    for (int draw = 0; draw < 10; ++draw) {
      std::shuffle(some.begin(), some.end(), random);
      const float u = draw == 0 ? 1 - 0x1p-24f : between(random);
      EXPECT_EQ(sample_unsorted(some, s, u), sample_token(logits, s, u)) << row << ", " << u;
    }
  }
}

TEST(Sample, CandidatesSufficeForTopK) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0, 3);
  const SampleSettings s{.temperature = 0.7f, .top_p = 0.9f, .top_k = 20};
  std::vector<float> logits(1000);
  for (float& x : logits) x = normal(random);
  for (uint32_t step = 0; step < 200; ++step) {
    const float u = uniform(1, 0, step);
    EXPECT_EQ(sample_token(logits, s, u), sample(top_candidates(logits, 64), s, u));
  }
}

}  // namespace
}  // namespace lily::plan
