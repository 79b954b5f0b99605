#include "server/openai_text.h"

#include <algorithm>
#include <ctime>

#include "server/openai_fields.h"
#include "server/transcript.h"

namespace lily::server {
namespace {

constexpr int32_t kDefaultMaxTokens = 16;  // OpenAI's

// That begin in these bytes.
size_t n_characters(std::string_view bytes) {
  return static_cast<size_t>(
      std::count_if(bytes.begin(), bytes.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

struct TextReply {
  std::string model;
  bool include_usage = false;
  int n_logprobs = -1;
  std::string echo;  // the prompt, where it was asked for
};

class TextWriter final : public AnswerWriter {
 public:
  TextWriter(TextReply reply, const text::Tokenizer& tokenizer)
      : reply_(std::move(reply)),
        tokenizer_(tokenizer),
        id_(new_id("cmpl-")),
        created_(std::time(nullptr)),
        n_sent_(n_characters(reply_.echo)),
        plain_chunk_(around(choice(RepeatedEvent::kHole, {}, 0))) {}

  std::string begin() override { return reply_.echo.empty() ? "" : chunk(reply_.echo); }

  std::string event(const engine::AnswerEvent& event) override {
    if (const auto* piece = std::get_if<engine::AnswerPiece>(&event)) {
      std::string out;
      if (reply_.n_logprobs >= 0)
        for (const engine::Token& token : piece->tokens) {
          said_.tokens.push_back(token);
          unsent_.push_back(token);
        }
      for (const text::OutputEvent& e : piece->events) {
        // No template, no roles: thinking is text like any other.
        said_.content += e.text;
        if (!e.text.empty()) out += chunk(e.text);
      }
      return out;
    }
    const auto* end = std::get_if<engine::AnswerEnd>(&event);
    if (end == nullptr) return {};
    said_.end = *end;
    return closing_chunks(head(), fresh_choice(""), finish_reason(), *end,
                          reply_.include_usage ? usage() : Json());
  }

  std::string keep_alive() override { return ": keep-alive\n\n"; }
  std::string failure(const ApiError& error) override { return sse(openai_error(error)); }

  Json whole() override {
    Json out = head();
    out["choices"] =
        Json::array({choice(reply_.echo + said_.content, said_.tokens, n_characters(reply_.echo))});
    out["choices"][0]["finish_reason"] = finish_reason();
    out["usage"] = usage();
    out["lily"] = lily_details(said_.end);
    return out;
  }

 private:
  Json head() const {
    return {{"id", id_}, {"object", "text_completion"}, {"created", created_}, {"model", reply_.model}};
  }

  // The old form: parallel lists.
  Json logprobs(const std::vector<engine::Token>& tokens, size_t offset) const {
    Json out = {{"tokens", Json::array()},
                {"token_logprobs", Json::array()},
                {"top_logprobs", Json::array()},
                {"text_offset", Json::array()}};
    for (const engine::Token& token : tokens) {
      out["tokens"].push_back(token_text(token.id, tokenizer_));
      out["token_logprobs"].push_back(finite_logprob(token.logprob));
      Json top = Json::object();
      for (size_t i = 0; i < token.top.size() && i < static_cast<size_t>(reply_.n_logprobs); ++i)
        top[token_text(token.top[i].id, tokenizer_)] = finite_logprob(token.top[i].logprob);
      out["top_logprobs"].push_back(top);
      out["text_offset"].push_back(offset);
      offset += n_characters(tokenizer_.token_bytes(token.id));
    }
    return out;
  }

  // `offset`: characters before the first of the tokens.
  Json choice(const std::string& text, const std::vector<engine::Token>& tokens, size_t offset) const {
    Json out = {{"index", 0}, {"text", text}};
    out["logprobs"] = reply_.n_logprobs >= 0 ? logprobs(tokens, offset) : Json();
    out["finish_reason"] = nullptr;
    return out;
  }

  // With the tokens since the last one.
  Json fresh_choice(const std::string& text) {
    Json out = choice(text, unsent_, n_sent_);
    for (const engine::Token& token : unsent_) n_sent_ += n_characters(tokenizer_.token_bytes(token.id));
    unsent_.clear();
    return out;
  }

  Json around(Json choice) const { return chunk_of(head(), std::move(choice)); }

  std::string chunk(const std::string& text) {
    return unsent_.empty() ? plain_chunk_.with(text) : sse(around(fresh_choice(text)));
  }

  const char* finish_reason() const { return said_.end.finish == engine::Finish::length ? "length" : "stop"; }

  Json usage() const { return openai_usage(said_.end.usage, 0); }

  TextReply reply_;
  const text::Tokenizer& tokenizer_;
  std::string id_;
  int64_t created_;
  Transcript said_;
  std::vector<engine::Token> unsent_;
  size_t n_sent_;              // characters of the echo and of the tokens that were sent
  RepeatedEvent plain_chunk_;  // without tokens to tell about
};

// A text, or token ids, or a list with one of them.
void parse_prompt(Body& body, const ServedModel& model, engine::TextRequest& request) {
  const Json* prompt = body.find("prompt");
  if (prompt == nullptr) body.fail("prompt", "a text or a list of token ids is needed");
  if (prompt->is_array() && !prompt->empty() && !prompt->front().is_number()) {
    if (prompt->size() != 1) body.fail("prompt", "one prompt a request is supported");
    prompt = &prompt->front();
  }
  if (!prompt->is_string() && !prompt->is_array())
    body.fail("prompt", "a text or a list of token ids is needed");
  if (prompt->is_string() ? prompt->get_ref<const std::string&>().empty() : prompt->empty())
    body.fail("prompt", "it is empty; there is nothing to continue");
  if (prompt->is_string()) {
    request.prompt = prompt->get<std::string>();
    return;
  }
  request.prompt = parse_token_ids(body, "prompt", *prompt, model.tokenizer.n_tokens());
}

}  // namespace

Call parse_text_completion(const Json& json, const ServedModel& model) {
  Body body(json);
  body.refuse("suffix", "filling a gap is not supported");
  refuse_several(body, "n");
  refuse_several(body, "best_of");
  engine::TextRequest request;
  TextReply reply{.model = body.text("model").value_or(model.id)};
  parse_prompt(body, model, request);
  if (auto format = body.object("response_format")) request.format = parse_format(*format);
  request.sampling = parse_sampling(body, model);
  request.max_tokens = parse_max_tokens(body, "max_tokens").value_or(kDefaultMaxTokens);
  request.stop = parse_stop(body, "stop");
  if (const auto n = body.integer("logprobs", 0, 20)) {
    reply.n_logprobs = static_cast<int>(*n);
    request.top_logprobs = reply.n_logprobs;
  }
  if (body.boolean("echo", false)) {
    if (reply.n_logprobs >= 0) body.fail("echo", "logprobs of the prompt are not supported");
    const auto* ids = std::get_if<std::vector<int32_t>>(&request.prompt);
    reply.echo = ids != nullptr ? model.tokenizer.decode(*ids) : std::get<std::string>(request.prompt);
  }
  Call call;
  reply.include_usage = parse_stream(body, call);
  body.find("user");
  call.ignored = body.unknown();
  call.request = std::move(request);
  call.writer = std::make_unique<TextWriter>(std::move(reply), model.tokenizer);
  return call;
}

}  // namespace lily::server
