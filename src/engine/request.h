// What a caller asks of the engine and what it gets back: plain values, usable from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.h"

namespace lily::engine {

// docs/numerics.md, "Sampling". The defaults change nothing: one draw from the model's own distribution.
struct SamplingParams {
  float temperature = 1;  // 0: greedy
  float top_p = 1;        // 1: off
  float min_p = 0;        // 0: off
  int32_t top_k = 0;      // 0: off
  float repetition_penalty = 1;
  float presence_penalty = 0;
  float frequency_penalty = 0;
  std::vector<std::pair<int32_t, float>> logit_bias;  // token id, added to its logit
  // One seed, one sequence number: the same text for the same logits, alone or in a batch.
  uint64_t seed = 0;
  uint32_t sequence = 0;
};

// The tokens that may come next, as bits; ids at or above the tokenizer's size are never allowed.
class TokenMask {
 public:
  explicit TokenMask(int32_t n_tokens)
      : n_tokens_(n_tokens), words_((static_cast<size_t>(n_tokens) + 63) / 64) {}
  int32_t n_tokens() const { return n_tokens_; }
  void allow(int32_t id) { words_[static_cast<size_t>(id) / 64] |= uint64_t{1} << (id % 64); }
  void forbid(int32_t id) { words_[static_cast<size_t>(id) / 64] &= ~(uint64_t{1} << (id % 64)); }
  bool allows(int32_t id) const {
    return id >= 0 && id < n_tokens_ && (words_[static_cast<size_t>(id) / 64] >> (id % 64) & 1) != 0;
  }
  void forbid_all() { words_.assign(words_.size(), 0); }
  void allow_all() { words_.assign(words_.size(), ~uint64_t{0}); }
  // Bit i of word w is token 64 w + i; bits from n_tokens on are ignored.
  std::span<uint64_t> words() { return words_; }

 private:
  int32_t n_tokens_;
  std::vector<uint64_t> words_;
};

// What a constraint did to an answer.
enum class StopDetail : uint8_t {
  none,
  loop,             // the text repeated itself: its thinking was closed, or the answer ended
  thinking_budget,  // the thinking was closed
};

// Grammar, tool calls, thinking budgets: decides before each token which ones may come. Called on the
// engine's thread, between two steps; what it throws ends its request with that error.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;
  // Every bit of `mask` is clear; set those that are allowed and return true, or return false if any token
  // may come. A mask without any token ends the request with an error.
  virtual bool allowed(TokenMask& mask) = 0;
  // Any token may come next: allowed() would return false. As long as it says so the device may choose.
  virtual bool is_free() const { return false; }
  // What the mask says of one token, where `can_ask_single` is true. Steps that end in candidates ask for
  // these alone, so that no mask of the whole vocabulary need be made for them.
  virtual bool allows(int32_t /*token*/) { return true; }
  virtual bool can_ask_single() const { return false; }
  virtual StopDetail detail() const { return StopDetail::none; }
  // The token that was chosen, the stop token included.
  virtual void accept(int32_t token) = 0;
};

struct GenerateRequest {
  // The whole prefix, always: the engine finds out how much of it is in its cache.
  std::vector<int32_t> prompt;
  // Requests of one conversation: their newest states replace their older ones in the cache. May be empty.
  std::string session;
  // How many tokens at the beginning of the prompt a later prompt will surely have too, such as those before
  // the generation prompt. The state there is kept, at the price of one more prompt chunk. 0: nothing is
  // known.
  int32_t n_stable = 0;
  // Places before it, rising, where later prompts may part from this one, such as the end of the system
  // message. States are kept there too, where that saves enough to be worth a prompt chunk of its own.
  std::vector<int32_t> branches;
  SamplingParams sampling;
  std::vector<int32_t> stop_ids;
  int32_t max_tokens = 0;  // 0: up to the context limit
  std::unique_ptr<TokenConstraint> constraint;
  int top_logprobs = -1;    // -1: none; 0: the chosen token's; n: also those of the n likeliest (at most 20)
  bool keep_states = true;  // false: nothing of this request stays in the cache
};

enum class Finish : uint8_t { stop, length, cancelled, error };

struct TokenLogprob {
  int32_t id = 0;
  float logprob = 0;  // log-softmax of the model's own logits, before bias, penalties and temperature
};

// Prompt tokens read so far. Comes after each prompt chunk; those that a reader does not take are dropped.
struct PromptProgress {
  int32_t n_done = 0, n_total = 0;
  int32_t n_cached = 0;  // of n_done
};

struct Token {
  int32_t id = 0;
  float logprob = 0;              // if logprobs were asked for
  std::vector<TokenLogprob> top;  // by falling logprob, then rising id
};

struct Usage {
  int32_t prompt_tokens = 0;
  int32_t cached_tokens = 0;      // of the prompt: not computed again
  int32_t completion_tokens = 0;  // a stop token included
  bool from_disk = false;         // what was cached came from a saved session
};

struct Timings {
  double queued_ms = 0;   // until the request was taken up
  double prefill_ms = 0;  // from there to the first token
  double ttft_ms = 0;     // the sum of both
  double decode_ms = 0;   // from the first token to the last one
};

// Where a prompt differs from what the prefix cache remembers, although both begin alike.
struct CacheMiss {
  int32_t position = 0;               // of the first token that differs
  std::vector<int32_t> before;        // the last tokens that agree
  std::vector<int32_t> known, asked;  // the next tokens, as remembered and as in the prompt
};

// The last event of every request.
struct Finished {
  Finish finish = Finish::stop;
  int32_t stop_id = -1;  // the stop token, which is not among the Token events; -1: none
  Fault fault = Fault::device;
  std::string error;  // for Finish::error; one line
  Usage usage;
  Timings timings;
  StopDetail detail = StopDetail::none;
  std::optional<CacheMiss> miss;  // why no more of the prompt was cached, if it differs from something cached
};

using Event = std::variant<PromptProgress, Token, Finished>;

// Refusals of Engine::generate that a server answers in its own way; the numbers are in the message too.
class QueueFull : public Error {
 public:
  explicit QueueFull(int capacity)
      : Error(Fault::device, fmt::format("{} requests are waiting already, which is the limit of the queue; "
                                         "try again later",
                                         capacity)) {}
};
class ContextExceeded : public Error {
 public:
  ContextExceeded(int64_t n_prompt, int64_t n_max_tokens, int64_t n_context);
  int64_t n_prompt, n_max_tokens, n_context;
};

}  // namespace lily::engine
