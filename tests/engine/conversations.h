// Random conversations with an assistant whose cache is far too small for them, and the same tokens given to
// an engine that remembers nothing: both must write the same (docs/numerics.md, "What 'the same output'
// means").
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "engine/assistant.h"

namespace lily::engine {

struct ConversationTrial {
  std::string folder;  // of a checkpoint with lily-tiny's tokenizer
  std::string backend;
  plan::KvType kv = plan::KvType::f32;
  unsigned seed = 1;
  int n_conversations = 10;
  int n_cached_states = 2;
  bool shared_pool = false;  // LoadOptions::memory; on the reference states and KV share places
  int context = 1024;
  int state_interval = 256;
  bool penalties = true;  // some requests have them, and are drawn from whole logits
};

// Where the two part: what was given to both so far, and what each wrote next.
struct Parting {
  std::span<const int32_t> ids;
  int32_t warm = 0, cold = 0;
  SamplingParams sampling;
  uint32_t step = 0;
};
// Says whether the two may part there. What follows is not compared.
using Judge = std::function<bool(const Parting& parting)>;

struct ConversationTally {
  int n_turns = 0, n_exact = 0;
  int n_cancelled = 0, n_called = 0, n_replayed = 0, n_branched = 0, n_edited = 0;
  int64_t n_prompt_tokens = 0, n_cached_tokens = 0, n_evictions = 0;
};

// Without a judge both must agree bit for bit, log-probabilities included.
ConversationTally converse(const ConversationTrial& trial, const Judge& judge = {});

// A random checkpoint of the smallest shape, with lily-tiny's tokenizer.
void write_small_model(const std::string& folder);

}  // namespace lily::engine
