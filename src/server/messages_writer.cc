// The answer of Anthropic's Messages: events of blocks, or one object with the same blocks.
#include <utility>

#include "base/sha256.h"
#include "server/blocks.h"
#include "server/messages.h"
#include "server/transcript.h"
#include "text/json_text.h"

namespace lily::server {
namespace {

class MessageWriter final : public BlockWriter {
 public:
  explicit MessageWriter(MessageAnswer answer)
      : BlockWriter("toolu_"), answer_(std::move(answer)), id_(new_id("msg_")) {}

  // Nothing yet: message_start says how much of the prompt is cached, which the first chunk of it tells.
  std::string begin() override { return {}; }
  std::string keep_alive() override { return send({{"type", "ping"}}); }
  std::string failure(const ApiError& error) override {
    return send(anthropic_error(error, error.request_id.empty() ? new_id("req_") : error.request_id));
  }

  Json whole() override {
    Json out = message();
    for (const Block& block : blocks()) out["content"].push_back(whole_block(block));
    out["stop_reason"] = stop_reason();
    out["stop_sequence"] = stop_sequence();
    out["usage"] = usage(end().usage);
    out["lily"] = lily_details(end());
    return out;
  }

 private:
  static std::string send(const Json& data) { return sse(data["type"].get_ref<const std::string&>(), data); }

  void on_progress(const engine::PromptProgress& progress, std::string& out) override {
    start({.prompt_tokens = progress.n_total, .cached_tokens = progress.n_cached}, out);
  }
  void on_first_piece(std::string& out) override { start(end().usage, out); }

  void start(const engine::Usage& known, std::string& out) {
    if (has_started_) return;
    has_started_ = true;
    Json opened = message();
    opened["usage"] = usage(known);
    out += send({{"type", "message_start"}, {"message", std::move(opened)}});
  }

  void on_open(Block& block, size_t index, std::string& out) override {
    Json empty;
    switch (block.kind) {
      case Block::Kind::reasoning:
        empty = {{"type", "thinking"}, {"thinking", ""}, {"signature", ""}};
        break;
      case Block::Kind::text:
        empty = {{"type", "text"}, {"text", ""}};
        break;
      case Block::Kind::call:
        empty = {{"type", "tool_use"}, {"id", block.id}, {"name", block.name}, {"input", Json::object()}};
        break;
    }
    out += send({{"type", "content_block_start"}, {"index", index}, {"content_block", std::move(empty)}});
  }

  void on_delta(const Block& block, size_t index, const std::string& delta, std::string& out) override {
    switch (block.kind) {
      case Block::Kind::reasoning:
        return send_delta(index, {{"type", "thinking_delta"}, {"thinking", delta}}, out);
      case Block::Kind::text:
        return send_delta(index, {{"type", "text_delta"}, {"text", delta}}, out);
      case Block::Kind::call:
        return send_delta(index, {{"type", "input_json_delta"}, {"partial_json", delta}}, out);
    }
  }

  void on_close(const Block& block, size_t index, std::string& out) override {
    if (block.kind == Block::Kind::reasoning)
      send_delta(index, {{"type", "signature_delta"}, {"signature", signature(block)}}, out);
    out += send({{"type", "content_block_stop"}, {"index", index}});
  }

  void on_end(std::string& out) override {
    Json last = {{"type", "message_delta"},
                 {"delta", {{"stop_reason", stop_reason()}, {"stop_sequence", stop_sequence()}}},
                 {"usage", usage(end().usage)}};
    last["lily"] = lily_details(end());
    out += send(last);
    out += send({{"type", "message_stop"}});
  }

  static void send_delta(size_t index, Json delta, std::string& out) {
    out += send({{"type", "content_block_delta"}, {"index", index}, {"delta", std::move(delta)}});
  }

  // Clients hand it back unread; it has only to be there.
  static std::string signature(const Block& block) { return sha256_hex(block.text); }

  static Json usage(const engine::Usage& u) {
    return {{"input_tokens", u.prompt_tokens - u.cached_tokens},
            {"cache_creation_input_tokens", 0},
            {"cache_read_input_tokens", u.cached_tokens},
            {"output_tokens", u.completion_tokens}};
  }

  Json message() const {
    return {{"id", id_},
            {"type", "message"},
            {"role", "assistant"},
            {"model", answer_.model},
            {"content", Json::array()},
            {"stop_reason", nullptr},
            {"stop_sequence", nullptr},
            {"usage", usage({})}};
  }

  static Json whole_block(const Block& block) {
    if (block.kind == Block::Kind::reasoning)
      return {{"type", "thinking"}, {"thinking", block.text}, {"signature", signature(block)}};
    if (block.kind == Block::Kind::text) return {{"type", "text"}, {"text", block.text}};
    // The input of a call that was cut is no object, and nobody must run half of it.
    auto input = block.complete ? text::parse_json(block.text) : std::nullopt;
    return {{"type", "tool_use"},
            {"id", block.id},
            {"name", block.name},
            {"input", input ? plain_numbers(*input) : Json::object()}};
  }

  std::string stop_reason() const {
    if (end().finish == engine::Finish::length)
      return end().context_full ? "model_context_window_exceeded" : "max_tokens";
    if (end().n_complete_calls > 0) return "tool_use";
    return end().stop_string >= 0 ? "stop_sequence" : "end_turn";
  }

  Json stop_sequence() const {
    const auto index = static_cast<size_t>(end().stop_string);
    if (end().stop_string < 0 || index >= answer_.stop.size() || stop_reason() != "stop_sequence")
      return nullptr;
    return answer_.stop[index];
  }

  const MessageAnswer answer_;
  const std::string id_;
  bool has_started_ = false;
};

}  // namespace

std::unique_ptr<AnswerWriter> make_message_writer(MessageAnswer answer) {
  return std::make_unique<MessageWriter>(std::move(answer));
}

}  // namespace lily::server
