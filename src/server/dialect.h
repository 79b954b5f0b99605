// Where the wire formats meet the server: a request is parsed into a Call, and the writer that comes with it
// turns the answer's events into bytes. No HTTP here, and no engine: everything can be tested with texts.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "engine/chat_request.h"
#include "server/api_error.h"
#include "server/body.h"
#include "text/tokenizer.h"

namespace lily::server {

// What the wire formats have to know of the model; outlives all calls.
struct ServedModel {
  const text::Tokenizer& tokenizer;
  std::string id;  // the name in /v1/models
  int64_t created = 0;
  int context = 0;
  bool preserve_thinking = false;  // where the request does not say
  bool keep_volatile = false;      // noise that differs in every request stays in prompts (docs/sessions.md)
};

// One answer on the wire. The events go through event() in both forms, so that the streamed answer and the
// whole one cannot disagree. Used by one thread.
class AnswerWriter {
 public:
  virtual ~AnswerWriter() = default;

  // ---- Streamed: text/event-stream, each returns what is to be sent now, which may be nothing.
  virtual std::string begin() = 0;
  // With AnswerEnd the closing events too. An end with an error is a failure().
  virtual std::string event(const engine::AnswerEvent& event) = 0;
  virtual std::string keep_alive() = 0;
  virtual std::string failure(const ApiError& error) = 0;

  // ---- Whole: after AnswerEnd has gone through event().
  virtual Json whole() = 0;
};

struct Call {
  std::variant<engine::ChatRequest, engine::TextRequest> request;
  bool stream = false;
  std::unique_ptr<AnswerWriter> writer;
  std::vector<std::string> ignored;  // names of fields that were ignored, for the log
};

// Ids that cannot be guessed: prefix and 24 letters and digits.
std::string new_id(std::string_view prefix);
// The id that the engine gave a call, behind a prefix; a new one where it gave none.
std::string call_id(std::string_view prefix, const text::OutputEvent& call);

// {"error": {...}} as OpenAI's clients read it, and as Anthropic's do.
Json openai_error(const ApiError& error);
Json anthropic_error(const ApiError& error, const std::string& request_id);

// One server-sent event.
std::string sse(const Json& data);
std::string sse(std::string_view event, const Json& data);

// A server-sent event that goes out for every token and differs in one value only: the JSON around it is
// written once.
class RepeatedEvent {
 public:
  static constexpr const char* kHole = "\x1f";  // stands in the data for the value
  // Behind the hole stands nothing that a client has said.
  explicit RepeatedEvent(const Json& data);
  std::string with(const Json& value) const;

 private:
  std::string before_, after_;
};

}  // namespace lily::server
