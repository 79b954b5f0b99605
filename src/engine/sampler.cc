#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <type_traits>
#include <utility>

#include "base/error.h"

namespace lily::engine {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

void require(bool good, const char* name, float value, const char* range) {
  if (!good) fail(Fault::user, "{} is {}; it must be {}", name, value, range);
}

void validate(const SamplingParams& p, int32_t n_tokens) {
  // Comparisons are written so that NaN fails them.
  require(p.temperature >= 0 && std::isfinite(p.temperature), "temperature", p.temperature, "0 or more");
  require(p.top_p > 0 && p.top_p <= 1, "top_p", p.top_p, "above 0 and at most 1");
  require(p.min_p >= 0 && p.min_p <= 1, "min_p", p.min_p, "between 0 and 1");
  require(p.top_k >= 0, "top_k", static_cast<float>(p.top_k), "0 or more");
  require(p.repetition_penalty > 0 && std::isfinite(p.repetition_penalty), "repetition_penalty",
          p.repetition_penalty, "above 0");
  require(std::isfinite(p.presence_penalty), "presence_penalty", p.presence_penalty, "a number");
  require(std::isfinite(p.frequency_penalty), "frequency_penalty", p.frequency_penalty, "a number");
  for (const auto& [id, bias] : p.logit_bias) {
    if (id < 0 || id >= n_tokens)
      fail(Fault::user, "logit_bias names token {}; ids go from 0 to {}", id, n_tokens - 1);
    require(std::isfinite(bias), "logit_bias", bias, "a number");
  }
}

bool before(const plan::Candidate& a, const plan::Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

[[noreturn]] void fail_none_allowed(const TokenMask* allowed) {
  if (allowed != nullptr) fail(Fault::user, "no token may come next: the constraint forbids all of them");
  fail(Fault::device, "no logit is a finite number; the device or the checkpoint is damaged");
}

}  // namespace

Sampler::Sampler(const SamplingParams& params, std::span<const int32_t> prompt, int32_t n_tokens)
    : params_(params), n_tokens_(n_tokens) {
  validate(params, n_tokens);
  const bool penalties =
      params.repetition_penalty != 1 || params.presence_penalty != 0 || params.frequency_penalty != 0;
  for (const auto& [id, bias] : params.logit_bias) history_[id].bias += bias;
  if (params.repetition_penalty != 1)
    for (const int32_t id : prompt) history_[id].seen = true;
  device_can_choose_ = !penalties && params.logit_bias.empty() &&
                       (greedy() || (params.top_k >= 1 && params.top_k <= kMaxDeviceTopK));
}

bool Sampler::candidates_can_do(int n_candidates) const {
  return greedy() || (params_.top_k >= 1 && params_.top_k <= n_candidates);
}

backend::Sampling Sampler::device_settings(uint32_t step) const {
  return {.temperature = params_.temperature,
          .top_p = params_.top_p,
          .min_p = params_.min_p,
          .top_k = params_.top_k,
          .seed = params_.seed,
          .sequence = params_.sequence,
          .step = step};
}

// Non-decreasing in `logit`, which the bound on tokens that are not candidates relies on.
float Sampler::adjusted(const History& h, float logit) const {
  float z = logit + h.bias;
  if (h.seen && params_.repetition_penalty != 1)
    z = z > 0 ? z / params_.repetition_penalty : z * params_.repetition_penalty;
  if (h.generated > 0)
    z -= params_.presence_penalty + params_.frequency_penalty * static_cast<float>(h.generated);
  return z;
}

plan::SampleSettings Sampler::settings() const {
  return {.temperature = params_.temperature,
          .top_p = params_.top_p,
          .min_p = params_.min_p,
          .top_k = params_.top_k};
}

int32_t Sampler::draw(std::span<const plan::Candidate> sorted, uint32_t step) const {
  return plan::sample(sorted, settings(), uniform(step));
}

int32_t Sampler::choose(std::span<const float> logits, const TokenMask* allowed, uint32_t step) const {
  LILY_CHECK(static_cast<int64_t>(logits.size()) >= n_tokens_, "{} logits", logits.size());
  std::vector<float> z(logits.begin(), logits.begin() + n_tokens_);
  for (const auto& [id, h] : history_) z[static_cast<size_t>(id)] = adjusted(h, z[static_cast<size_t>(id)]);
  if (allowed != nullptr)
    for (int32_t id = 0; id < n_tokens_; ++id)
      if (!allowed->allows(id)) z[static_cast<size_t>(id)] = kMinusInfinity;

  std::vector<plan::Candidate> possible;
  float largest = kMinusInfinity;
  for (int32_t id = 0; id < n_tokens_; ++id) {
    const float logit = plan::without_nan(z[static_cast<size_t>(id)]);
    if (logit > kMinusInfinity) possible.push_back({id, logit});
    largest = std::max(largest, logit);
  }
  if (!std::isfinite(largest)) fail_none_allowed(allowed);
  if (!greedy() && params_.top_k == 0)
    return plan::sample_unsorted(std::move(possible), settings(), uniform(step));
  return draw(plan::first_candidates(std::move(possible), greedy() ? 1 : params_.top_k), step);
}

std::optional<int32_t> Sampler::choose(const CandidateRow& row, const TokenMask* allowed,
                                       uint32_t step) const {
  if (allowed == nullptr) return choose_from(row, nullptr, Rule::exact, step);
  return choose_from(row, [&](int32_t id) { return allowed->allows(id); }, Rule::exact, step);
}

std::optional<int32_t> Sampler::choose(const CandidateRow& row, TokenConstraint& constraint,
                                       uint32_t step) const {
  return choose_from(row, [&](int32_t id) { return constraint.allows(id); }, Rule::candidates_first, step);
}

template <typename Allows>
std::optional<int32_t> Sampler::choose_from(const CandidateRow& row, const Allows& allows, Rule rule,
                                            uint32_t step) const {
  constexpr bool kConstrained = !std::is_same_v<Allows, std::nullptr_t>;
  std::vector<plan::Candidate> kept;
  float smallest = std::numeric_limits<float>::infinity();  // no other token's logit is above it
  int32_t n_real = 0;
  std::unordered_map<int32_t, bool> is_candidate;
  for (size_t i = 0; i < row.ids.size(); ++i) {
    const int32_t id = row.ids[i];
    if (id < 0 || id >= n_tokens_ || !(row.logits[i] > kMinusInfinity)) continue;
    ++n_real;
    smallest = std::min(smallest, row.logits[i]);
    const auto h = history_.find(id);
    if (h != history_.end()) is_candidate[id] = true;
    if constexpr (kConstrained) {
      if (!allows(id)) continue;
    }
    kept.push_back({id, h == history_.end() ? row.logits[i] : adjusted(h->second, row.logits[i])});
  }
  if (n_real == 0) return std::nullopt;
  if (n_real < n_tokens_) {
    float bound = smallest;
    for (const auto& [id, h] : history_)
      if (!is_candidate.contains(id)) bound = std::max(bound, adjusted(h, smallest));
    const int64_t wanted = greedy() ? 1 : params_.top_k;
    if (wanted <= 0) return std::nullopt;
    // Strictly above: among equal logits the lowest id wins, and it need not be a candidate's.
    const auto above =
        std::count_if(kept.begin(), kept.end(), [&](const plan::Candidate& c) { return c.logit > bound; });
    if (above < wanted) {
      // Without bias, penalties and mask the candidates stand in the very order of all tokens.
      const bool in_order = history_.empty() && !kConstrained && static_cast<int64_t>(kept.size()) >= wanted;
      const bool allowed_enough = rule == Rule::candidates_first && !greedy() && bound <= smallest;
      if (!in_order && !allowed_enough) return std::nullopt;
    }
  }
  if (kept.empty()) return std::nullopt;
  std::sort(kept.begin(), kept.end(), before);
  if (!std::isfinite(kept[0].logit)) return std::nullopt;
  return draw(kept, step);
}

void Sampler::accept(int32_t id) {
  if (params_.repetition_penalty == 1 && params_.presence_penalty == 0 && params_.frequency_penalty == 0)
    return;
  History& h = history_[id];
  h.seen = true;
  ++h.generated;
}

Token with_logprobs(int32_t id, std::span<const float> logits, int32_t n_tokens, int n) {
  const std::span<const float> real = logits.first(static_cast<size_t>(n_tokens));
  const float sum = plan::logsumexp(real);
  Token token{.id = id, .logprob = real[static_cast<size_t>(id)] - sum};
  for (const plan::Candidate& c : plan::top_candidates(real, n)) token.top.push_back({c.id, c.logit - sum});
  return token;
}

std::optional<Token> with_logprobs(int32_t id, const CandidateRow& row, int n) {
  const auto at = std::find(row.ids.begin(), row.ids.end(), id);
  if (at == row.ids.end()) return std::nullopt;
  Token token{.id = id, .logprob = row.logits[static_cast<size_t>(at - row.ids.begin())] - row.logsumexp};
  for (size_t i = 0; i < std::min(row.ids.size(), static_cast<size_t>(n)); ++i)
    token.top.push_back({row.ids[i], row.logits[i] - row.logsumexp});
  return token;
}

}  // namespace lily::engine
