// The answer of the Responses API: events of items, or one response object with the same items.
#include <ctime>
#include <utility>

#include "server/blocks.h"
#include "server/responses.h"
#include "server/text_field.h"
#include "server/transcript.h"

namespace lily::server {
namespace {

class ResponseWriter final : public BlockWriter {
 public:
  explicit ResponseWriter(ResponseAnswer answer)
      : BlockWriter("call_"),
        answer_(std::move(answer)),
        id_(new_id("resp_")),
        created_(std::time(nullptr)) {}

  std::string begin() override {
    std::string out;
    send("response.created", {{"response", response("in_progress")}}, out);
    send("response.in_progress", {{"response", response("in_progress")}}, out);
    return out;
  }
  std::string keep_alive() override { return ": keep-alive\n\n"; }
  std::string failure(const ApiError& error) override {
    Json failed = response("failed");
    failed["error"] = {{"code", error.code.empty() ? error.type : error.code}, {"message", error.what()}};
    std::string out;
    send("response.failed", {{"response", std::move(failed)}}, out);
    return out;
  }
  Json whole() override { return finished(); }

 private:
  // An item of the output, which grows with its block.
  struct Item {
    std::string id;
    const WireTool* tool = nullptr;  // of a call of a declared function
    TextField field{kCustomInput};
    std::string input;  // of a custom tool, decoded
    bool is_custom() const { return tool != nullptr && tool->is_custom; }
  };

  void send(const char* type, Json members, std::string& out) {
    Json event = {{"type", type}, {"sequence_number", sequence_++}};
    event.update(members);
    out += sse(type, event);
  }
  // An event about an item: its id and place come first.
  void send_of(const char* type, size_t index, Json members, std::string& out) {
    Json event = {{"item_id", items_[index].id}, {"output_index", index}};
    event.update(members);
    send(type, std::move(event), out);
  }

  void on_open(Block& block, size_t index, std::string& out) override {
    Item& item = items_.emplace_back();
    switch (block.kind) {
      case Block::Kind::reasoning:
        item.id = new_id("rs_");
        break;
      case Block::Kind::text:
        item.id = new_id("msg_");
        break;
      case Block::Kind::call:
        if (const auto at = answer_.tools.find(block.name); at != answer_.tools.end())
          item.tool = &at->second;
        item.id = new_id(item.is_custom() ? "ctc_" : "fc_");
        break;
    }
    send("response.output_item.added",
         {{"output_index", index}, {"item", item_json(block, item, "in_progress")}}, out);
    if (block.kind == Block::Kind::reasoning)
      send_of("response.reasoning_summary_part.added", index,
              {{"summary_index", 0}, {"part", {{"type", "summary_text"}, {"text", ""}}}}, out);
    if (block.kind == Block::Kind::text)
      send_of("response.content_part.added", index, {{"content_index", 0}, {"part", text_part("")}}, out);
  }

  void on_delta(const Block& block, size_t index, const std::string& delta, std::string& out) override {
    switch (block.kind) {
      case Block::Kind::reasoning:
        send_of("response.reasoning_summary_text.delta", index, {{"summary_index", 0}, {"delta", delta}},
                out);
        send_of("response.reasoning_text.delta", index, {{"content_index", 0}, {"delta", delta}}, out);
        return;
      case Block::Kind::text:
        send_of("response.output_text.delta", index,
                {{"content_index", 0}, {"delta", delta}, {"logprobs", Json::array()}}, out);
        return;
      case Block::Kind::call:
        if (items_[index].is_custom()) send_input(index, items_[index].field.push(delta), out);
        else send_of("response.function_call_arguments.delta", index, {{"delta", delta}}, out);
        return;
    }
  }

  void send_input(size_t index, const std::string& text, std::string& out) {
    if (text.empty()) return;
    items_[index].input += text;
    send_of("response.custom_tool_call_input.delta", index, {{"delta", text}}, out);
  }

  void on_close(const Block& block, size_t index, std::string& out) override {
    Item& item = items_[index];
    switch (block.kind) {
      case Block::Kind::reasoning:
        send_of("response.reasoning_summary_text.done", index, {{"summary_index", 0}, {"text", block.text}},
                out);
        send_of("response.reasoning_text.done", index, {{"content_index", 0}, {"text", block.text}}, out);
        send_of("response.reasoning_summary_part.done", index,
                {{"summary_index", 0}, {"part", {{"type", "summary_text"}, {"text", block.text}}}}, out);
        break;
      case Block::Kind::text:
        send_of("response.output_text.done", index,
                {{"content_index", 0}, {"text", block.text}, {"logprobs", Json::array()}}, out);
        send_of("response.content_part.done", index, {{"content_index", 0}, {"part", text_part(block.text)}},
                out);
        break;
      case Block::Kind::call:
        if (item.is_custom()) {
          // The model gave no `input` first: what it gave is handed on as it is.
          if (!item.field.has_begun()) send_input(index, input_of(block.text), out);
          send_of("response.custom_tool_call_input.done", index, {{"input", item.input}}, out);
        } else {
          send_of("response.function_call_arguments.done", index,
                  {{"name", block.name}, {"arguments", block.text}}, out);
        }
        break;
    }
    send("response.output_item.done",
         {{"output_index", index}, {"item", item_json(block, item, status_of(block))}}, out);
  }

  void on_end(std::string& out) override {
    Json last = finished();
    if (answer_.store != nullptr) answer_.store->put(id_, {last, conversation()});
    send(is_cut() ? "response.incomplete" : "response.completed", {{"response", std::move(last)}}, out);
  }

  static std::string input_of(const std::string& arguments) {
    const Json json = Json::parse(arguments, nullptr, false);
    if (json.is_object() && json.contains(kCustomInput) && json[kCustomInput].is_string())
      return json[kCustomInput].get<std::string>();
    return arguments;
  }

  static Json text_part(const std::string& text) {
    return {
        {"type", "output_text"}, {"text", text}, {"annotations", Json::array()}, {"logprobs", Json::array()}};
  }

  static const char* status_of(const Block& block) { return block.complete ? "completed" : "incomplete"; }
  bool is_cut() const { return end().finish == engine::Finish::length; }

  // `in_progress`: the item as it opens, with nothing in it.
  static Json item_json(const Block& block, const Item& item, const char* status) {
    Json out = {{"id", item.id}};
    switch (block.kind) {
      case Block::Kind::reasoning:
        out["type"] = "reasoning";
        out["summary"] = Json::array();
        out["content"] = Json::array();
        if (!block.text.empty()) {
          out["summary"].push_back({{"type", "summary_text"}, {"text", block.text}});
          out["content"].push_back({{"type", "reasoning_text"}, {"text", block.text}});
        }
        out["encrypted_content"] = nullptr;
        break;
      case Block::Kind::text:
        out["type"] = "message";
        out["role"] = "assistant";
        out["content"] = Json::array();
        if (!block.text.empty()) out["content"].push_back(text_part(block.text));
        break;
      case Block::Kind::call:
        out["type"] = item.is_custom() ? "custom_tool_call" : "function_call";
        out["call_id"] = block.id;
        out["name"] = item.tool == nullptr ? block.name : item.tool->name;
        if (item.tool != nullptr && !item.tool->name_space.empty()) out["namespace"] = item.tool->name_space;
        out[item.is_custom() ? "input" : "arguments"] = item.is_custom() ? item.input : block.text;
        break;
    }
    out["status"] = status;
    return out;
  }

  Json response(const char* status) const {
    Json out = {{"id", id_}, {"object", "response"}, {"created_at", created_}, {"status", status}};
    out["background"] = false;
    out["error"] = nullptr;
    out["incomplete_details"] = nullptr;
    out["output"] = Json::array();
    out["usage"] = nullptr;
    out.update(answer_.echo);
    return out;
  }

  Json finished() const {
    Json out = response(is_cut() ? "incomplete" : "completed");
    if (is_cut()) out["incomplete_details"] = {{"reason", "max_output_tokens"}};
    for (size_t i = 0; i < blocks().size(); ++i)
      out["output"].push_back(item_json(blocks()[i], items_[i], status_of(blocks()[i])));
    const engine::Usage& u = end().usage;
    out["usage"] = {{"input_tokens", u.prompt_tokens},
                    {"input_tokens_details", {{"cached_tokens", u.cached_tokens}}},
                    {"output_tokens", u.completion_tokens},
                    {"output_tokens_details", {{"reasoning_tokens", end().reasoning_tokens}}},
                    {"total_tokens", u.prompt_tokens + u.completion_tokens}};
    out["lily"] = lily_details(end());
    return out;
  }

  // What a later request goes on from: the conversation and this answer.
  std::vector<text::Message> conversation() const {
    std::vector<text::Message> messages = answer_.messages;
    text::Message said{.role = "assistant"};
    for (const Block& block : blocks()) {
      if (block.kind == Block::Kind::reasoning)
        said.reasoning_content = said.reasoning_content.value_or("") + block.text;
      else if (block.kind == Block::Kind::text)
        said.content.push_back({text::ContentPart::Kind::text, block.text});
      else if (block.complete) said.tool_calls.push_back({block.name, Json(block.text), block.id});
    }
    messages.push_back(std::move(said));
    return messages;
  }

  const ResponseAnswer answer_;
  const std::string id_;
  const int64_t created_;
  int64_t sequence_ = 0;
  std::vector<Item> items_;  // one a block
};

}  // namespace

std::unique_ptr<AnswerWriter> make_response_writer(ResponseAnswer answer) {
  return std::make_unique<ResponseWriter>(std::move(answer));
}

}  // namespace lily::server
