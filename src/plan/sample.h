// The meaning of GreedyToken, SampleToken and TopCandidates: pure functions over one row of logits, used by
// the host sampler and by the CPU backends, and the oracle for the kernels of the others (docs/numerics.md,
// "Sampling").
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace lily::plan {

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// The uniform number of a step in [0, 1), a multiple of 2^-24: the first word of the block with counter
// {step, sequence, 0, 0} and key {low, high word of seed}, its upper 24 bits.
float uniform(uint64_t seed, uint32_t sequence, uint32_t step);

// Temperature 0 is arg max. Filters in the order top-k, top-p, min-p (0, 1 and 0 switch them off).
struct SampleSettings {
  float temperature = 1;
  float top_p = 1;
  float min_p = 0;
  int32_t top_k = 0;
};

// NaN counts as minus infinity.
inline float without_nan(float logit) {
  return std::isnan(logit) ? -std::numeric_limits<float>::infinity() : logit;
}

struct Candidate {
  int32_t id;
  float logit;
};

// The n largest by falling logit, then rising id; fewer where the row is shorter. NaN counts as minus
// infinity.
std::vector<Candidate> top_candidates(std::span<const float> logits, int64_t n);
// The same out of some candidates in any order, without NaN.
std::vector<Candidate> first_candidates(std::vector<Candidate> some, int64_t n);
int32_t greedy_token(std::span<const float> logits);  // lowest id on ties
float logsumexp(std::span<const float> logits);       // sum in double

// One draw. `sorted` holds candidates as top_candidates returns them: all of them, or at least as many as the
// settings can keep (top_k > 0 and n >= top_k).
int32_t sample(std::span<const Candidate> sorted, const SampleSettings& settings, float u);
// The same without top-k, from candidates in any order of which the largest logit is finite: sorts only as
// far as the draw goes. The softmax's denominator is summed in the order given.
int32_t sample_unsorted(std::vector<Candidate> some, const SampleSettings& settings, float u);
// The same from a row of logits.
int32_t sample_token(std::span<const float> logits, const SampleSettings& settings, float u);

}  // namespace lily::plan
