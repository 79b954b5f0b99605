#include "server/openai_chat.h"

#include <ctime>

#include "server/content.h"
#include "server/openai_fields.h"
#include "server/transcript.h"
#include "text/normalise.h"

namespace lily::server {
namespace {

using engine::AnswerEnd;
using engine::AnswerPiece;
using engine::PromptProgress;
using Kind = text::OutputEvent::Kind;

struct Reply {
  std::string model;
  bool include_usage = false;
  bool progress = false;
  bool logprobs = false;
  int n_top = 0;
};

class ChatWriter final : public AnswerWriter {
 public:
  ChatWriter(Reply reply, const text::Tokenizer& tokenizer)
      : reply_(std::move(reply)),
        tokenizer_(tokenizer),
        id_(new_id("chatcmpl-")),
        created_(std::time(nullptr)),
        plain_chunk_(around(choice(RepeatedEvent::kHole))) {}

  std::string begin() override { return chunk({{"role", "assistant"}, {"content", ""}}); }

  std::string event(const engine::AnswerEvent& event) override {
    if (const auto* piece = std::get_if<AnswerPiece>(&event)) return take(*piece);
    if (const auto* end = std::get_if<AnswerEnd>(&event)) return take(*end);
    const auto& progress = std::get<PromptProgress>(event);
    if (!reply_.progress) return {};
    Json out = head("chat.completion.chunk");
    out["choices"] = Json::array();
    out["lily"] = {{"progress",
                    {{"done", progress.n_done}, {"total", progress.n_total}, {"cached", progress.n_cached}}}};
    return sse(out);
  }

  std::string keep_alive() override { return ": keep-alive\n\n"; }
  std::string failure(const ApiError& error) override { return sse(openai_error(error)); }

  Json whole() override {
    Json message = {{"role", "assistant"}};
    message["content"] = said_.content.empty() && !said_.calls.empty() ? Json() : Json(said_.content);
    if (!said_.reasoning.empty()) {
      message["reasoning_content"] = said_.reasoning;
      message["reasoning"] = said_.reasoning;
    }
    for (const Transcript::Call& call : said_.calls)
      message["tool_calls"].push_back({{"id", call.id},
                                       {"type", "function"},
                                       {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
    Json choice = {{"index", 0}, {"message", message}};
    choice["logprobs"] = reply_.logprobs ? logprobs(said_.tokens) : Json();
    choice["finish_reason"] = finish_reason();
    Json out = head("chat.completion");
    out["choices"] = Json::array({choice});
    out["usage"] = usage();
    out["lily"] = lily_details(said_.end);
    return out;
  }

 private:
  std::string take(const AnswerPiece& piece) {
    if (reply_.logprobs)
      for (const engine::Token& token : piece.tokens) {
        said_.tokens.push_back(token);
        unsent_.push_back(token);
      }
    std::string out;
    for (const text::OutputEvent& event : piece.events) {
      said_.add(event, "call_");
      if (event.kind != Kind::call_end) out += chunk(delta(event));
    }
    return out;
  }

  std::string take(const AnswerEnd& end) {
    said_.end = end;
    return closing_chunks(head("chat.completion.chunk"), choice(Json::object()), finish_reason(), end,
                          reply_.include_usage ? usage() : Json());
  }

  Json delta(const text::OutputEvent& event) const {
    switch (event.kind) {
      case Kind::reasoning:
        return {{"reasoning_content", event.text}, {"reasoning", event.text}};
      case Kind::call_begin:
        return {{"tool_calls", Json::array({{{"index", event.call},
                                             {"id", said_.calls.back().id},
                                             {"type", "function"},
                                             {"function", {{"name", event.text}, {"arguments", ""}}}}})}};
      case Kind::call_arguments:
        return {{"tool_calls",
                 Json::array({{{"index", event.call}, {"function", {{"arguments", event.text}}}}})}};
      default:
        return {{"content", event.text}};
    }
  }

  Json head(const char* object) const {
    return {{"id", id_},
            {"object", object},
            {"created", created_},
            {"model", reply_.model},
            {"system_fingerprint", "lily"}};
  }

  Json logprobs(const std::vector<engine::Token>& tokens) const {
    Json out = {{"content", logprobs_content(tokens, reply_.n_top, tokenizer_)}};
    out["refusal"] = nullptr;
    return out;
  }

  Json choice(const Json& delta) {
    Json out = {{"index", 0}, {"delta", delta}};
    out["logprobs"] = unsent_.empty() ? Json() : logprobs(unsent_);
    unsent_.clear();
    out["finish_reason"] = nullptr;
    return out;
  }

  Json around(Json choice) const { return chunk_of(head("chat.completion.chunk"), std::move(choice)); }

  std::string chunk(const Json& delta) {
    return unsent_.empty() ? plain_chunk_.with(delta) : sse(around(choice(delta)));
  }

  const char* finish_reason() const {
    if (said_.end.finish == engine::Finish::length) return "length";
    return said_.end.n_complete_calls > 0 ? "tool_calls" : "stop";
  }

  Json usage() const { return openai_usage(said_.end.usage, said_.end.reasoning_tokens); }

  Reply reply_;
  const text::Tokenizer& tokenizer_;
  std::string id_;
  int64_t created_;
  Transcript said_;
  std::vector<engine::Token> unsent_;  // whose logprobs go out with the next chunk
  RepeatedEvent plain_chunk_;          // without tokens to tell about
};

void refuse_what_is_not_supported(Body& body) {
  body.refuse("audio", "audio is not supported");
  body.refuse("prediction", "predicted outputs are not supported");
  body.refuse("functions", "use tools");
  body.refuse("function_call", "use tool_choice");
  body.refuse("web_search_options", "there is no web search; declare a function as a tool");
  if (const Json* modalities = body.array("modalities"))
    for (const Json& modality : *modalities)
      if (modality != "text") body.fail("modalities", "only text is supported");
  refuse_several(body, "n");
}

void parse_reasoning(Body& body, const ServedModel& model, engine::Thinking& thinking,
                     std::vector<std::string>& ignored) {
  thinking.preserve = model.preserve_thinking;
  if (const auto effort = body.text("reasoning_effort")) apply_effort(*effort, "reasoning_effort", thinking);
  if (auto reasoning = body.object("reasoning"))  // as some routers send it
    if (const auto effort = reasoning->text("effort")) apply_effort(*effort, "reasoning.effort", thinking);
  parse_thinking(body, thinking, ignored);
}

// A fault in them is told with its place.
std::vector<text::Message> parse_chat_messages(Body& body) {
  const Json* list = body.array("messages");
  if (list == nullptr) body.fail("messages", "a list of messages is needed");
  for (size_t i = 0; i < list->size(); ++i) {
    if (!(*list)[i].is_object()) continue;
    const auto content = (*list)[i].find("content");
    if (content == (*list)[i].end() || !content->is_array()) continue;
    for (size_t j = 0; j < content->size(); ++j)
      if ((*content)[j].is_object()) part_text((*content)[j], fmt::format("messages[{}].content[{}]", i, j));
  }
  try {
    std::vector<text::Message> messages = text::parse_messages(*list);
    text::normalise(messages, {});  // finds the other faults, while the messages have the client's numbers
    return messages;
  } catch (const Error& e) {
    const std::string what = e.what();
    const std::string at = what.substr(0, what.find(':'));
    throw ApiError::bad_field(at.starts_with("messages") ? at : "messages", what);
  }
}

}  // namespace

Call parse_chat_completion(const Json& json, const ServedModel& model) {
  Body body(json);
  refuse_what_is_not_supported(body);
  engine::ChatRequest request;
  Reply reply{.model = body.text("model").value_or(model.id)};

  Call call;
  request.messages = parse_chat_messages(body);
  if (const Json* tools = body.array("tools")) parse_functions(*tools, request);
  request.tool_choice = parse_tool_choice(body, request.tools);
  if (auto format = body.object("response_format")) request.format = parse_format(*format);
  parse_reasoning(body, model, request.thinking, call.ignored);
  request.sampling = parse_sampling(body, model);
  for (const char* name : {"max_tokens", "max_completion_tokens"})
    if (const auto n = parse_max_tokens(body, name)) request.max_tokens = n;
  request.stop = parse_stop(body, "stop");
  request.add_generation_prompt = body.boolean("add_generation_prompt", true);
  request.cache_key = body.text("prompt_cache_key").value_or("");

  reply.logprobs = body.boolean("logprobs", false);
  if (const auto n = body.integer("top_logprobs", 0, 20)) {
    if (!reply.logprobs && *n > 0) body.fail("top_logprobs", "logprobs has to be true");
    reply.n_top = static_cast<int>(*n);
  }
  if (reply.logprobs) request.top_logprobs = reply.n_top;
  reply.include_usage = parse_stream(body, call);
  reply.progress = body.boolean("return_progress", false);
  for (const char* name : {"user", "metadata", "store", "service_tier", "safety_identifier"}) body.find(name);
  add_ignored(call.ignored, body.unknown());
  call.request = std::move(request);
  call.writer = std::make_unique<ChatWriter>(std::move(reply), model.tokenizer);
  return call;
}

}  // namespace lily::server
