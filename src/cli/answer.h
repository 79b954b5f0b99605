// One answer at the command line: what `lily run` and the interactive chat share.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"
#include "engine/assistant.h"
#include "text/chat.h"
#include "text/output_parser.h"

namespace lily::cli {

// Unset values are the checkpoint's (generation_config.json).
struct AnswerOptions {
  std::optional<float> temperature, top_p, min_p, presence_penalty, repetition_penalty;
  std::optional<int32_t> top_k;
  std::optional<uint64_t> seed;  // unset: random
  int max_tokens = 0;            // 0: the rest of the context
  std::vector<std::string> stop;
  bool think = true;
  bool preserve_thinking = false;
};

struct Answer {
  text::ParsedOutput output;
  std::vector<int32_t> token_ids;  // without the stop token
  engine::AnswerEnd end;

  // "stop", "length", "tool_calls" or "cancelled".
  std::string finish_reason() const;
  double prefill_tok_s() const;  // of the tokens that were read, not the cached ones
  double decode_tok_s() const;
};

// Loads the model that the options name, with a progress bar.
// Before the model is loaded.
void keep_on_disk(engine::Assistant& assistant, const DiskOptions& disk);
std::unique_ptr<engine::Assistant> load_assistant(const ModelOptions& options, const DiskOptions& disk = {});

// Called with each event as it comes; from the thread that calls answer().
using EventSink = std::function<void(const text::OutputEvent&)>;
// Returns early with Finish::cancelled once `interrupted()`. Throws Error for a request that cannot be
// answered.
Answer answer(engine::Assistant& assistant, const std::vector<text::Message>& messages,
              const nlohmann::ordered_json& tools, const AnswerOptions& options, const EventSink& sink);

}  // namespace lily::cli
