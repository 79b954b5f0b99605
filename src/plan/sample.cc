#include "plan/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/error.h"

namespace lily::plan {
namespace {

bool before(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

}  // namespace

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

float uniform(uint64_t seed, uint32_t sequence, uint32_t step) {
  const std::array<uint32_t, 2> key = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  return static_cast<float>(philox4x32({step, sequence, 0, 0}, key)[0] >> 8) * 0x1p-24f;
}

std::vector<Candidate> top_candidates(std::span<const float> logits, int64_t n) {
  std::vector<Candidate> all(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) all[i] = {static_cast<int32_t>(i), without_nan(logits[i])};
  return first_candidates(std::move(all), n);
}

std::vector<Candidate> first_candidates(std::vector<Candidate> some, int64_t n) {
  const auto kept = static_cast<size_t>(std::clamp<int64_t>(n, 0, static_cast<int64_t>(some.size())));
  std::partial_sort(some.begin(), some.begin() + static_cast<std::ptrdiff_t>(kept), some.end(), before);
  some.resize(kept);
  return some;
}

int32_t greedy_token(std::span<const float> logits) {
  LILY_CHECK(!logits.empty());
  size_t best = 0;
  for (size_t i = 1; i < logits.size(); ++i)
    if (without_nan(logits[i]) > without_nan(logits[best])) best = i;
  return static_cast<int32_t>(best);
}

float logsumexp(std::span<const float> logits) {
  float largest = -std::numeric_limits<float>::infinity();
  for (const float x : logits) largest = std::max(largest, without_nan(x));
  if (std::isinf(largest)) return largest;
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(without_nan(x)) - largest);
  return static_cast<float>(largest + std::log(sum));
}

int32_t sample(std::span<const Candidate> sorted, const SampleSettings& settings, float u) {
  LILY_CHECK(!sorted.empty());
  if (settings.temperature <= 0) return sorted[0].id;
  size_t n = sorted.size();
  if (settings.top_k > 0) n = std::min(n, static_cast<size_t>(settings.top_k));

  // Weights relative to the largest logit; the softmax's denominator is their sum.
  std::vector<double> weight(n);
  double sum = 0;
  for (size_t i = 0; i < n; ++i) {
    const float scaled = (sorted[i].logit - sorted[0].logit) / settings.temperature;
    weight[i] = i == 0 ? 1.0 : std::exp(static_cast<double>(scaled));
    if (std::isnan(weight[i])) weight[i] = 0;  // minus infinity less minus infinity
    sum += weight[i];
  }
  if (settings.top_p < 1) {
    double prefix = 0;
    size_t kept = 0;
    while (kept < n) {
      prefix += weight[kept++];
      if (prefix >= static_cast<double>(settings.top_p) * sum) break;
    }
    n = kept;
  }
  // Weights fall, so those below min_p * largest are a suffix; the first is always kept.
  while (n > 1 && weight[n - 1] < static_cast<double>(settings.min_p) * weight[0]) --n;

  double total = 0;
  for (size_t i = 0; i < n; ++i) total += weight[i];
  double prefix = 0;
  for (size_t i = 0; i < n; ++i) {
    prefix += weight[i];
    if (prefix > static_cast<double>(u) * total) return sorted[i].id;
  }
  return sorted[n - 1].id;
}

int32_t sample_unsorted(std::vector<Candidate> some, const SampleSettings& settings, float u) {
  LILY_CHECK(!some.empty() && settings.temperature > 0 && settings.top_k == 0);
  float largest = some[0].logit;
  for (const Candidate& c : some) largest = std::max(largest, c.logit);
  const auto weight = [&](const Candidate& c) {
    return std::exp(static_cast<double>((c.logit - largest) / settings.temperature));
  };
  double sum = 0;
  for (const Candidate& c : some) sum += weight(c);

  constexpr size_t kFirstSorted = 64, kGrowth = 8;
  size_t n_sorted = 0;
  const auto at = [&](size_t i) -> const Candidate& {
    while (i >= n_sorted) {
      const size_t n = std::min(some.size(), std::max(kFirstSorted, n_sorted * kGrowth));
      const auto first = some.begin() + static_cast<std::ptrdiff_t>(n_sorted);
      const auto end = some.begin() + static_cast<std::ptrdiff_t>(n);
      if (end != some.end()) std::nth_element(first, end, some.end(), before);
      std::sort(first, end, before);
      n_sorted = n;
    }
    return some[i];
  };
  size_t n = some.size();
  double total = sum;
  if (settings.top_p < 1 || settings.min_p > 0) {
    n = 0, total = 0;
    while (n < some.size()) {
      const double w = weight(at(n));
      if (n > 0 && w < static_cast<double>(settings.min_p)) break;
      total += w;
      ++n;
      if (settings.top_p < 1 && total >= static_cast<double>(settings.top_p) * sum) break;
    }
  }
  double prefix = 0;
  for (size_t i = 0; i < n; ++i) {
    prefix += weight(at(i));
    if (prefix > static_cast<double>(u) * total) return at(i).id;
  }
  return at(n - 1).id;
}

int32_t sample_token(std::span<const float> logits, const SampleSettings& settings, float u) {
  if (settings.temperature <= 0) return greedy_token(logits);
  const int64_t n = settings.top_k > 0 ? settings.top_k : static_cast<int64_t>(logits.size());
  return sample(top_candidates(logits, n), settings, u);
}

}  // namespace lily::plan
