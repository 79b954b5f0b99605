#include "server/dialect.h"

#include "base/error.h"
#include "base/random_name.h"
#include "engine/replay.h"

namespace lily::server {

std::string new_id(std::string_view prefix) {
  return std::string(prefix) + random_name(engine::kCallIdLetters);
}

std::string call_id(std::string_view prefix, const text::OutputEvent& call) {
  return call.id.empty() ? new_id(prefix) : std::string(prefix) + call.id;
}

Json openai_error(const ApiError& error) {
  Json inner = {{"message", error.what()}, {"type", error.type}};
  inner["param"] = error.param.empty() ? Json() : Json(error.param);
  inner["code"] = error.code.empty() ? Json() : Json(error.code);
  inner.update(error.more);
  return {{"error", inner}};
}

Json anthropic_error(const ApiError& error, const std::string& request_id) {
  std::string message = error.what();
  std::string type = error.type;
  if (error.code == "context_length_exceeded" && error.more.contains("n_prompt_tokens"))
    message = fmt::format("prompt is too long: {} tokens > {} maximum",
                          error.more["n_prompt_tokens"].get<int64_t>(), error.more["n_ctx"].get<int64_t>());
  if (error.status >= 500 && type == "server_error") type = "api_error";
  return {{"type", "error"}, {"error", {{"type", type}, {"message", message}}}, {"request_id", request_id}};
}

std::string sse(const Json& data) { return "data: " + to_text(data) + "\n\n"; }

std::string sse(std::string_view event, const Json& data) {
  return fmt::format("event: {}\ndata: {}\n\n", event, to_text(data));
}

RepeatedEvent::RepeatedEvent(const Json& data) {
  const std::string whole = sse(data), hole = to_text(kHole);
  const size_t at = whole.rfind(hole);
  LILY_CHECK(at != whole.npos, "an event without a hole: {}", whole);
  before_ = whole.substr(0, at);
  after_ = whole.substr(at + hole.size());
}

std::string RepeatedEvent::with(const Json& value) const { return before_ + to_text(value) + after_; }

}  // namespace lily::server
