// A conversation to be answered and the answer as it comes, in no client's dialect: plain values between the
// server's dialects (or the command line) and the assistant. Usable from any thread.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.h"
#include "engine/request.h"
#include "text/chat.h"
#include "text/output_parser.h"

namespace lily::engine {

// What the model may do with its tools.
struct ToolChoice {
  enum class Kind : uint8_t {
    automatic,
    none,      // the tools stay in the prompt, calls are impossible
    required,  // at least one call
    named,     // a call of this function
  };
  Kind kind = Kind::automatic;
  std::string name;      // of `named`; a declared function
  bool parallel = true;  // false: the answer ends after its first call
};

// The form of the visible text; it holds from the end of the thinking on.
struct OutputFormat {
  enum class Kind : uint8_t { text, json_object, json_schema };
  Kind kind = Kind::text;
  nlohmann::ordered_json schema;          // of json_schema
  std::string field = "response_format";  // of the request, for what is wrong with the schema
};

// A schema that an answer cannot be held to. `field` of the request has it: "response_format",
// "tools[0].function.parameters".
struct SchemaRefused : Error {
  SchemaRefused(std::string at, const std::string& message)
      : Error(Fault::user, message), field(std::move(at)) {}
  std::string field;
};

// Where the request has a tool's name and its schema, for what is wrong with them: "tools[0].function.name".
struct ToolPlace {
  std::string name, schema;
};

struct Thinking {
  bool enabled = true;
  std::optional<int32_t> budget;  // tokens, then the thinking is closed; absent: no bound
  bool preserve = false;          // keep the thinking of turns before the last user query
};

// What is absent is the checkpoint's default (generation_config.json); the seed's is random.
struct SamplingOverrides {
  std::optional<float> temperature, top_p, min_p;
  std::optional<float> presence_penalty, frequency_penalty, repetition_penalty;
  std::optional<int32_t> top_k;
  std::optional<uint64_t> seed;
  std::vector<std::pair<int32_t, float>> logit_bias;  // token id, added to its logit
};

struct ChatRequest {
  std::vector<text::Message> messages;  // as clients send them; the assistant normalises
  nlohmann::ordered_json tools;         // an array of {"type": "function", "function": {...}}, or null
  std::vector<ToolPlace> tool_places;   // [tools] or none: as chat completions have them
  ToolChoice tool_choice;
  OutputFormat format;
  Thinking thinking;
  SamplingOverrides sampling;
  std::optional<int32_t> max_tokens;  // absent: the rest of the context
  std::vector<std::string> stop;      // strings that end the visible text
  int top_logprobs = -1;              // GenerateRequest::top_logprobs
  bool add_generation_prompt = true;
  std::string cache_key;  // requests of one conversation, where the client says so
};

// Text that is continued as it is, without a template.
struct TextRequest {
  std::variant<std::string, std::vector<int32_t>> prompt;  // a text, in which control tokens count, or ids
  OutputFormat format;
  SamplingOverrides sampling;
  std::optional<int32_t> max_tokens;
  std::vector<std::string> stop;
  int top_logprobs = -1;
};

// Some tokens, and what became visible by them. Either may be empty: text can be held back that may be the
// head of a stop string or of call syntax.
struct AnswerPiece {
  std::vector<text::OutputEvent> events;
  std::vector<Token> tokens;
};

// The last event of every answer.
struct AnswerEnd {
  enum class Detail : uint8_t { none, stop_string, loop, thinking_budget };
  Finish finish = Finish::stop;
  Detail detail = Detail::none;
  int stop_string = -1;       // index into `stop` of the string that ended the answer
  int n_complete_calls = 0;   // more than none and finish == stop: the answer ends in calls
  bool context_full = false;  // with Finish::length: the context ended, not max_tokens
  Fault fault = Fault::device;
  std::string error;  // for Finish::error; one line
  Usage usage;
  int32_t reasoning_tokens = 0;  // of usage.completion_tokens
  Timings timings;
  uint64_t seed = 0;
  std::string cache_source = "none";  // where the cached prefix came from: none, ram, disk
  std::string cache_miss;             // why the cached prefix ends where it does; may be empty
  // The same with the texts around. They may be another client's: for the log of whoever owns the machine.
  std::optional<CacheMiss> miss;
};

using AnswerEvent = std::variant<PromptProgress, AnswerPiece, AnswerEnd>;

}  // namespace lily::engine
