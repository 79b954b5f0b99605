// Fidelity and quality in figures: what `lily eval` prints and the golden tests assert.
//
// Perplexity is exp of the mean negative log-likelihood over all predictions of a text; top-1 agreement and
// logit errors are counted at selected positions (docs/numerics.md, "What 'the same output' means").
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "engine/executor.h"
#include "engine/goldens.h"

namespace lily::engine {

// Called now and then with tokens done; for a progress bar.
using EvalProgress = std::function<void(int64_t n_done, int64_t n_total)>;

// Reads `ids` from the first one on in chunks of at most chunk_rows (0: the executor's), and gives the logits
// of every position from `first` on, in order. The executor is idle and nobody else's; its slots and blocks
// are overwritten.
void read_forced(Executor& executor, std::span<const int32_t> ids, int chunk_rows, int64_t first,
                 const std::function<void(int64_t position, std::span<const float> logits)>& row);

struct ForcedScore {
  std::vector<double> nll;               // [n - 1]
  std::vector<int32_t> positions;        // where logits were kept
  std::vector<std::vector<float>> rows;  // [positions][vocab]
  double perplexity() const;
};
ForcedScore score(Executor& executor, std::span<const int32_t> ids, std::span<const int32_t> positions,
                  int chunk_rows = 0, const EvalProgress& progress = {});

struct ForcedReport {
  int64_t predictions = 0;
  int64_t positions = 0;
  double perplexity = 0, reference_perplexity = 0;
  int64_t top1_agreement = 0;      // of `positions`
  double max_abs_logit_error = 0;  // over the reference's largest logits (goldens: 64 of each position)
  double perplexity_ratio() const { return perplexity / reference_perplexity; }
};
ForcedReport compare(const ForcedScore& score, const GoldenForced& golden);
// The second one is the reference; both kept the same positions.
ForcedReport compare(const ForcedScore& score, const ForcedScore& reference, int32_t n_tokens);

struct GreedyComparison {
  int64_t n_agreed = 0;  // tokens before the first difference
  bool exact = false;
  float divergence_margin = 0;  // the golden margin where they part; 0 if exact
};
// `output` as a request's tokens, with its stop token.
GreedyComparison compare(std::span<const int32_t> output, const GoldenPrompt& golden);

struct GreedyReport {
  int64_t prompts = 0, exact = 0;
  float first_divergence_margin_max = 0;  // 0 if all are exact
  uint64_t tokens_hash = 0;               // of all answers: equal ones have the same
  std::vector<GreedyComparison> each;
};
// Lets the engine answer every prompt, several at a time.
GreedyReport run_greedy(Engine& engine, std::span<const GoldenPrompt> prompts,
                        const std::vector<int32_t>& stop_ids, const EvalProgress& progress = {});

// The tokens of one greedy answer, stop token included.
std::vector<int32_t> greedy_output(Generation generation, const std::function<void()>& on_token = {});

}  // namespace lily::engine
