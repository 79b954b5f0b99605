// A loaded model that answers conversations: checkpoint, tokenizer, template, engine and output parser
// together. What `lily run` and the interactive chat share.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"
#include "engine/engine.h"
#include "engine/load.h"
#include "text/chat.h"
#include "text/output_parser.h"
#include "text/tokenizer.h"

namespace lily::cli {

// Unset values are the checkpoint's (generation_config.json).
struct AnswerOptions {
  std::optional<double> temperature, top_p, min_p, presence_penalty, repetition_penalty;
  std::optional<int> top_k;
  std::optional<uint64_t> seed;  // unset: random
  int max_tokens = 0;            // 0: the rest of the context
  std::vector<std::string> stop;
  bool think = true;
  bool preserve_thinking = false;
};

struct Answer {
  text::ParsedOutput output;
  std::vector<int32_t> token_ids;  // without the stop token
  engine::Finish finish = engine::Finish::stop;
  int stop_string = -1;  // index into AnswerOptions::stop
  engine::Usage usage;
  engine::Timings timings;
  uint64_t seed = 0;

  // "stop", "length", "tool_calls" or "cancelled".
  std::string finish_reason() const;
  double prefill_tok_s() const;  // of the tokens that were read, not the cached ones
  double decode_tok_s() const;
};

class Assistant {
 public:
  explicit Assistant(const ModelOptions& options);

  // Called with each event as it comes; from the thread that calls answer().
  using Sink = std::function<void(const text::OutputEvent&)>;
  // Returns early with Finish::cancelled once `interrupted()`. Throws Error for a request that cannot be
  // answered.
  Answer answer(const std::vector<text::Message>& messages, const nlohmann::ordered_json& tools,
                const AnswerOptions& options, const Sink& sink);

  const std::string& folder() const { return folder_; }
  const std::string& backend() const { return backend_; }
  int context() const;

 private:
  engine::SamplingParams sampling(const AnswerOptions& options) const;

  std::string folder_, backend_;
  std::unique_ptr<model::Checkpoint> checkpoint_;
  std::unique_ptr<text::Tokenizer> tokenizer_;
  std::unique_ptr<engine::LoadedModel> model_;
  std::unique_ptr<engine::Engine> engine_;
};

// Warns once where the checkpoint's chat template is not the one that lily implements.
void check_template(const std::string& folder);

}  // namespace lily::cli
