// Golden outputs of an independent implementation, as a folder of files: what `lily eval` and the golden
// tests compare with. tests/golden/lily-tiny/README.md tells where they come from.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace lily::engine {

// A prompt and its greedy continuation, the stop token included.
struct GoldenPrompt {
  std::string task;
  std::vector<int32_t> prompt;
  std::vector<int32_t> output;
  std::vector<float> margins;  // [output] top-1 less top-2 logit of each step
};

// Next-token predictions along a text.
struct GoldenForced {
  std::vector<int32_t> ids;        // [n]
  std::vector<int32_t> positions;  // [m] rising; logits at position p predict token p + 1
  int n_top = 0;
  std::vector<int32_t> top_ids;   // [m, n_top] by falling logit
  std::vector<float> top_logits;  // [m, n_top]
  std::vector<float> nll;         // [n - 1] negative log-likelihood of token p + 1
  double perplexity = 0;
};

struct Goldens {
  std::vector<GoldenPrompt> prompts;        // prompts.jsonl
  std::optional<GoldenForced> forced;       // teacher_forced.npz
  std::optional<GoldenPrompt> long_prompt;  // long.json
  std::vector<float> long_last_nll;         // of the long prompt's last tokens
};

// Reads those of the files that the folder has; throws Error(Fault::user) if it has none, Fault::model for
// what does not have the form above, or names a token that the tokenizer's n_tokens do not include.
Goldens load_goldens(const std::filesystem::path& folder, int32_t n_tokens);

}  // namespace lily::engine
