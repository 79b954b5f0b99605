// The host sampler against an oracle that does every step of docs/numerics.md, "Sampling", in the most
// literal way.
#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <random>

namespace lily::engine {
namespace {

constexpr int32_t kSampled = 50;
constexpr int32_t kVocab = 56;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> random_logits(std::mt19937& random, bool with_ties) {
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(kVocab, -kInfinity);
  for (int32_t i = 0; i < kSampled; ++i) {
    const float z = normal(random);
    logits[static_cast<size_t>(i)] = with_ties ? std::round(z) : z;
  }
  return logits;
}

// s1 to s10, literally; `margin` receives the distance of the draw from an edge of the distribution.
int32_t oracle(const SamplingParams& p, const std::vector<int32_t>& prompt,
               const std::vector<int32_t>& generated, const std::vector<float>& logits, const TokenMask* mask,
               double u, double* margin) {
  *margin = 1;
  std::map<int32_t, double> z;
  for (int32_t i = 0; i < kSampled; ++i) z[i] = logits[static_cast<size_t>(i)];
  for (const auto& [id, bias] : p.logit_bias) z[id] = static_cast<float>(z[id] + bias);
  for (auto& [id, value] : z) {
    const auto count = std::count(generated.begin(), generated.end(), id);
    const bool seen = count > 0 || std::count(prompt.begin(), prompt.end(), id) > 0;
    if (seen) value = value > 0 ? value / p.repetition_penalty : value * p.repetition_penalty;
    if (count > 0) value -= p.presence_penalty + p.frequency_penalty * static_cast<double>(count);
  }
  std::vector<std::pair<double, int32_t>> order;  // (-z, id): sorted by falling z, then rising id
  for (const auto& [id, value] : z)
    if (mask == nullptr || mask->allows(id)) order.emplace_back(-value, id);
  std::sort(order.begin(), order.end());
  if (p.temperature == 0) {
    if (order.size() > 1) *margin = order[1].first - order[0].first;
    return order[0].second;
  }
  if (p.top_k > 0 && order.size() > static_cast<size_t>(p.top_k)) {
    *margin = std::min(
        *margin, order[static_cast<size_t>(p.top_k)].first - order[static_cast<size_t>(p.top_k) - 1].first);
    order.resize(static_cast<size_t>(p.top_k));
  }
  std::vector<double> probability;
  double sum = 0;
  for (const auto& [negative, id] : order) {
    probability.push_back(std::exp((order[0].first - negative) / p.temperature));
    sum += probability.back();
  }
  for (double& x : probability) x /= sum;
  if (p.top_p < 1) {
    double prefix = 0;
    size_t kept = 0;
    while (kept < probability.size()) {
      prefix += probability[kept++];
      *margin = std::min(*margin, std::abs(prefix - static_cast<double>(p.top_p)));
      if (prefix >= static_cast<double>(p.top_p)) break;
    }
    probability.resize(kept);
  }
  size_t kept = 0;
  for (size_t i = 0; i < probability.size(); ++i) {
    const double edge = static_cast<double>(p.min_p) * probability[0];
    if (p.min_p > 0) *margin = std::min(*margin, std::abs(probability[i] - edge));
    if (i == 0 || probability[i] >= edge) kept = i + 1;
  }
  probability.resize(kept);
  double total = 0;
  for (const double x : probability) total += x;
  double prefix = 0;
  for (size_t i = 0; i < probability.size(); ++i) {
    prefix += probability[i] / total;
    *margin = std::min(*margin, std::abs(prefix - u));
    if (prefix > u) return order[i].second;
  }
  return order[probability.size() - 1].second;
}

SamplingParams random_params(std::mt19937& random) {
  const auto pick = [&](std::initializer_list<float> values) {
    return *(values.begin() + random() % values.size());
  };
  SamplingParams p{.temperature = pick({0, 0.3f, 0.7f, 1, 1.7f}),
                   .top_p = pick({1, 1, 0.95f, 0.5f, 0.01f}),
                   .min_p = pick({0, 0, 0.1f, 0.9f}),
                   .top_k = static_cast<int32_t>(pick({0, 1, 3, 20, 60})),
                   .repetition_penalty = pick({1, 1, 1.3f, 0.8f}),
                   .presence_penalty = pick({0, 0, 1.5f, -0.7f}),
                   .frequency_penalty = pick({0, 0, 0.4f, -0.2f}),
                   .seed = random(),
                   .sequence = static_cast<uint32_t>(random() % 3)};
  for (uint32_t i = random() % 3; i > 0; --i)
    p.logit_bias.emplace_back(static_cast<int32_t>(random() % kSampled), pick({-100, -2, 3, 100}));
  return p;
}

// Continuous logits: an edge is hit with probability zero, and steps that come closer to one than rounding
// can decide are left out.
TEST(Sampler, AgreesWithTheOracleFromLogitsAndFromCandidates) {
  const unsigned seed = 7;
  std::mt19937 random(seed);
  int compared = 0, from_candidates = 0;
  for (int round = 0; round < 3000; ++round) {
    const SamplingParams p = random_params(random);
    std::vector<int32_t> prompt, generated;
    for (int i = 0; i < 6; ++i) prompt.push_back(static_cast<int32_t>(random() % kSampled));
    for (uint32_t i = random() % 6; i > 0; --i)
      generated.push_back(static_cast<int32_t>(random() % kSampled));
    Sampler sampler(p, prompt, kSampled);
    for (const int32_t id : generated) sampler.accept(id);
    const std::vector<float> logits = random_logits(random, false);
    std::optional<TokenMask> mask;
    if (random() % 3 == 0) {
      mask.emplace(kSampled);
      for (int32_t id = 0; id < kSampled; ++id)
        if (random() % 4 != 0) mask->allow(id);
    }
    const TokenMask* allowed = mask ? &*mask : nullptr;
    const auto step = static_cast<uint32_t>(generated.size());
    double margin = 0;
    const int32_t expected =
        oracle(p, prompt, generated, logits, allowed, plan::uniform(p.seed, p.sequence, step), &margin);
    if (margin < 1e-5) continue;
    ++compared;
    ASSERT_EQ(sampler.choose(logits, allowed, step), expected) << "seed " << seed << " round " << round;

    const auto top = plan::top_candidates(std::span(logits).first(kSampled), 24);
    std::vector<int32_t> ids;
    std::vector<float> values;
    for (const auto& c : top) {
      ids.push_back(c.id);
      values.push_back(c.logit);
    }
    const auto chosen = sampler.choose(CandidateRow{ids, values, 0}, allowed, step);
    if (!chosen) continue;
    ++from_candidates;
    ASSERT_EQ(*chosen, expected) << "seed " << seed << " round " << round;
  }
  EXPECT_GT(compared, 2700);
  EXPECT_GT(from_candidates, 1000) << "candidates should be enough most of the time with a small top-k";
}

// With ties a candidate list that is not provably enough must say so; when it does not, it must be right.
TEST(Sampler, CandidatesAreNeverTrustedTooFar) {
  std::mt19937 random(11);
  for (int round = 0; round < 3000; ++round) {
    SamplingParams p = random_params(random);
    p.min_p = 0;
    std::vector<int32_t> prompt = {static_cast<int32_t>(random() % kSampled)};
    Sampler sampler(p, prompt, kSampled);
    const std::vector<float> logits = random_logits(random, true);
    const auto top = plan::top_candidates(std::span(logits).first(kSampled), 5);
    std::vector<int32_t> ids;
    std::vector<float> values;
    for (const auto& c : top) {
      ids.push_back(c.id);
      values.push_back(c.logit);
    }
    const auto chosen = sampler.choose(CandidateRow{ids, values, 0}, nullptr, 0);
    if (chosen) ASSERT_EQ(*chosen, sampler.choose(logits, nullptr, 0)) << "round " << round;
  }
}

TEST(Sampler, TakesTheLowestIdOnTies) {
  std::vector<float> logits(kVocab, 1.0f);
  logits[30] = logits[12] = logits[40] = 5;
  EXPECT_EQ(Sampler({.temperature = 0}, {}, kSampled).choose(logits, nullptr, 0), 12);
  EXPECT_EQ(Sampler({.top_k = 1}, {}, kSampled).choose(logits, nullptr, 0), 12);
}

TEST(Sampler, NeverChoosesPadding) {
  std::vector<float> logits(kVocab, 0.0f);
  for (int32_t i = kSampled; i < kVocab; ++i) logits[static_cast<size_t>(i)] = 100;
  EXPECT_EQ(Sampler({.temperature = 0}, {}, kSampled).choose(logits, nullptr, 0), 0);
  for (uint32_t step = 0; step < 200; ++step)
    EXPECT_LT(Sampler({.seed = 3}, {}, kSampled).choose(logits, nullptr, step), kSampled);
}

TEST(Sampler, DrawsFollowTheDistribution) {
  std::vector<float> logits(kVocab, -kInfinity);
  logits[3] = std::log(0.5f), logits[9] = std::log(0.3f), logits[20] = std::log(0.2f);
  const Sampler sampler({.seed = 42}, {}, kSampled);
  std::map<int32_t, int> counts;
  const int n = 20000;
  for (int step = 0; step < n; ++step) ++counts[sampler.choose(logits, nullptr, static_cast<uint32_t>(step))];
  // Five standard deviations of a binomial count.
  for (const auto& [id, p] : std::map<int32_t, double>{{3, 0.5}, {9, 0.3}, {20, 0.2}})
    EXPECT_NEAR(counts[id], n * p, 5 * std::sqrt(n * p * (1 - p))) << "token " << id;
}

TEST(Sampler, SeedSequenceAndStepAreTheKey) {
  std::vector<float> logits(kVocab, 0.0f);
  const auto text = [&](uint64_t seed, uint32_t sequence) {
    std::vector<int32_t> ids;
    const Sampler sampler({.seed = seed, .sequence = sequence}, {}, kSampled);
    for (uint32_t step = 0; step < 20; ++step) ids.push_back(sampler.choose(logits, nullptr, step));
    return ids;
  };
  EXPECT_EQ(text(1, 0), text(1, 0));
  EXPECT_NE(text(1, 0), text(2, 0));
  EXPECT_NE(text(1, 0), text(1, 1));
  EXPECT_NE(text(1, 0), text(1ull << 32 | 1, 0));
}

TEST(Sampler, PresenceAndFrequencyCountOnlyWhatWasGenerated) {
  std::vector<float> logits(kVocab, 0.0f);
  logits[5] = 1;
  Sampler sampler({.temperature = 0, .presence_penalty = 2}, std::vector<int32_t>{5, 5, 5}, kSampled);
  EXPECT_EQ(sampler.choose(logits, nullptr, 0), 5);
  sampler.accept(5);
  EXPECT_EQ(sampler.choose(logits, nullptr, 1), 0);
  Sampler repetition({.temperature = 0, .repetition_penalty = 1e6f}, std::vector<int32_t>{5}, kSampled);
  logits[6] = 0.5f;
  EXPECT_EQ(repetition.choose(logits, nullptr, 0), 6);
}

TEST(Sampler, SaysWhenNoTokenMayCome) {
  const std::vector<float> logits(kVocab, 0.0f);
  const TokenMask nothing(kSampled);
  const Sampler sampler({.temperature = 0}, {}, kSampled);
  try {
    sampler.choose(logits, &nothing, 0);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.fault(), Fault::user);
    EXPECT_NE(std::string(e.what()).find("constraint"), std::string::npos);
  }
  const std::vector<float> broken(kVocab, std::numeric_limits<float>::quiet_NaN());
  try {
    sampler.choose(broken, nullptr, 0);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.fault(), Fault::device);
  }
}

TEST(Sampler, RefusesParametersOutOfRangeByName) {
  const auto message = [](const SamplingParams& p) -> std::string {
    try {
      const Sampler sampler(p, {}, kSampled);
    } catch (const Error& e) {
      EXPECT_EQ(e.fault(), Fault::user);
      return e.what();
    }
    return "accepted";
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_NE(message({.temperature = -1}).find("temperature is -1"), std::string::npos);
  EXPECT_NE(message({.temperature = nan}).find("temperature"), std::string::npos);
  EXPECT_NE(message({.top_p = 0}).find("top_p"), std::string::npos);
  EXPECT_NE(message({.min_p = 1.5f}).find("min_p"), std::string::npos);
  EXPECT_NE(message({.top_k = -1}).find("top_k"), std::string::npos);
  EXPECT_NE(message({.repetition_penalty = 0}).find("repetition_penalty"), std::string::npos);
  EXPECT_NE(message({.logit_bias = {{kSampled, 1.0f}}}).find("token 50"), std::string::npos);
  EXPECT_EQ(message({}), "accepted");
}

TEST(Sampler, TheDeviceChoosesOnlyWhatItCan) {
  const auto device = [](const SamplingParams& p) { return Sampler(p, {}, kSampled).device_can_choose(); };
  EXPECT_TRUE(device({.temperature = 0}));
  EXPECT_TRUE(device({.top_p = 0.9f, .top_k = 20}));
  EXPECT_FALSE(device({.top_k = 0}));
  EXPECT_FALSE(device({.top_k = kMaxDeviceTopK + 1}));
  EXPECT_FALSE(device({.temperature = 0, .presence_penalty = 0.1f}));
  EXPECT_FALSE(device({.temperature = 0, .logit_bias = {{1, 1.0f}}}));
}

TEST(Logprobs, AreLogSoftmaxOfTheModelsOwnLogits) {
  std::mt19937 random(5);
  const std::vector<float> logits = random_logits(random, false);
  double sum = 0;
  for (int32_t i = 0; i < kSampled; ++i) sum += std::exp(static_cast<double>(logits[static_cast<size_t>(i)]));
  const Token token = with_logprobs(7, logits, kSampled, 3);
  EXPECT_NEAR(token.logprob, logits[7] - std::log(sum), 1e-5);
  ASSERT_EQ(token.top.size(), 3u);
  const auto top = plan::top_candidates(std::span(logits).first(kSampled), 3);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(token.top[i].id, top[i].id);
    EXPECT_NEAR(token.top[i].logprob, top[i].logit - std::log(sum), 1e-5);
  }
  const std::vector<int32_t> ids = {top[0].id, top[1].id};
  const std::vector<float> values = {top[0].logit, top[1].logit};
  const CandidateRow row{ids, values, static_cast<float>(std::log(sum))};
  EXPECT_NEAR(with_logprobs(top[1].id, row, 1)->logprob, top[1].logit - std::log(sum), 1e-5);
  EXPECT_FALSE(with_logprobs(top[2].id, row, 1));
}

}  // namespace
}  // namespace lily::engine
