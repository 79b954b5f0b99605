// Chooses the next token of one sequence (docs/numerics.md, "Sampling"): logit bias, repetition, presence and
// frequency penalties, masks, then plan/sample.h's temperature, filters and draw. The device chooses the same
// token from the same logits where it can; here is the rest.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "backend/backend.h"
#include "engine/request.h"
#include "plan/sample.h"

namespace lily::engine {

// The largest top-k that a step ending in a sampled token is asked for; above it, and without top-k, the host
// samples from whole logits.
inline constexpr int32_t kMaxDeviceTopK = 64;

// A row of a step's candidates.
struct CandidateRow {
  std::span<const int32_t> ids;  // by falling logit, then rising id
  std::span<const float> logits;
  float logsumexp = 0;
};

class Sampler {
 public:
  // Throws Error(Fault::user) for parameters out of range. n_tokens: ids from there on are padding.
  Sampler(const SamplingParams& params, std::span<const int32_t> prompt, int32_t n_tokens);

  // Nothing depends on earlier tokens, and the settings are the device's.
  bool device_can_choose() const { return device_can_choose_; }
  bool greedy() const { return params_.temperature == 0; }
  // Candidates may be enough: there is a bound on how many tokens can be kept.
  bool candidates_can_do(int n_candidates) const;
  backend::Sampling device_settings(uint32_t step) const;

  // The token of generated index `step`. `allowed` is absent where any token may come.
  // Throws Error(Fault::user) if no token is allowed, Error(Fault::device) if no logit is a number.
  int32_t choose(std::span<const float> logits, const TokenMask* allowed, uint32_t step) const;
  // Nothing if other tokens than the candidates could have been chosen: whole logits are needed.
  std::optional<int32_t> choose(const CandidateRow& row, const TokenMask* allowed, uint32_t step) const;
  // A constraint that can be asked for single tokens. Where it allows fewer candidates than top-k wants,
  // these are enough: docs/numerics.md, "Sampling".
  std::optional<int32_t> choose(const CandidateRow& row, TokenConstraint& constraint, uint32_t step) const;

  // Counts a generated token.
  void accept(int32_t id);

 private:
  struct History {
    float bias = 0;
    bool seen = false;      // in prompt or output
    int32_t generated = 0;  // times
  };
  float adjusted(const History& h, float logit) const;
  enum class Rule : uint8_t { exact, candidates_first };
  // Allows: bool(int32_t), or nullptr where any token may come.
  template <typename Allows>
  std::optional<int32_t> choose_from(const CandidateRow& row, const Allows& allows, Rule rule,
                                     uint32_t step) const;
  int32_t draw(std::span<const plan::Candidate> sorted, uint32_t step) const;
  plan::SampleSettings settings() const;
  float uniform(uint32_t step) const { return plan::uniform(params_.seed, params_.sequence, step); }

  SamplingParams params_;
  int32_t n_tokens_;
  bool device_can_choose_;
  std::unordered_map<int32_t, History>
      history_;  // of tokens whose logits change; empty without bias and penalties
};

// Log-softmax values of the model's own logits: the chosen token's, and those of the n likeliest.
Token with_logprobs(int32_t id, std::span<const float> logits, int32_t n_tokens, int n);
// Nothing if the chosen token is not among the candidates.
std::optional<Token> with_logprobs(int32_t id, const CandidateRow& row, int n);

}  // namespace lily::engine
