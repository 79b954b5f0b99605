#include "cli/conversation_file.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/aside_file.h"
#include "base/error.h"
#include "base/file.h"
#include "base/printable.h"
#include "engine/session_io.h"
#include "text/chat_template.h"

namespace lily::cli {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr uint64_t kMaxConversationBytes = uint64_t{256} << 20;

bool is_conversation(const OrderedJson& json) { return json.is_object() && json.contains("messages"); }

// A form that only conversation_json() has: somebody's file with more in it than messages stays.
bool is_saved_json(const std::string& path) {
  const OrderedJson json = OrderedJson::parse(read_conversation(path), nullptr, false);
  return is_conversation(json) && json.size() == 1 && json["messages"].is_array();
}

bool is_saved_session(const std::string& path) {
  try {
    return engine::SessionReader(path).header().kind == engine::SessionKind::chat;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

OrderedJson conversation_json(const std::vector<text::Message>& messages) {
  OrderedJson list = OrderedJson::array();
  for (const text::Message& message : messages) {
    std::string content;
    for (const text::ContentPart& part : message.content) content += part.text;
    OrderedJson turn = {{"role", message.role}, {"content", content}};
    if (message.reasoning_content) turn["reasoning_content"] = *message.reasoning_content;
    for (const text::ToolCall& call : message.tool_calls)
      turn["tool_calls"].push_back(
          {{"type", "function"},
           {"function",
            {{"name", call.name}, {"arguments", call.arguments.value_or(OrderedJson::object())}}}});
    list.push_back(std::move(turn));
  }
  return {{"messages", list}};
}

std::vector<text::Message> parse_conversation(const std::string& json, const OrderedJson& tools,
                                              const std::string& path) {
  const OrderedJson parsed = OrderedJson::parse(json, nullptr, false);
  if (!is_conversation(parsed)) fail(Fault::user, "{}: expected a JSON object with \"messages\"", path);
  try {
    std::vector<text::Message> messages = text::parse_messages(parsed["messages"]);
    // Throws what the next question would run into.
    if (!messages.empty()) text::render(messages, tools, {.allow_no_query = true});
    return messages;
  } catch (const Error& e) {
    fail(Fault::user, "{}: {}; correct the file, or load another; the chat goes on as it was", path,
         e.what());
  }
}

void write_conversation(const std::vector<text::Message>& messages, const std::string& path) {
  AsideFile file(path);
  file.write(conversation_json(messages).dump(2, ' ', false, OrderedJson::error_handler_t::replace));
  file.write("\n");
  file.publish();
}

std::string read_conversation(const std::string& path) { return read_text_file(path, kMaxConversationBytes); }

void check_replaceable(const std::string& path) {
  std::error_code failed;
  const auto status = std::filesystem::status(path, failed);
  if (!std::filesystem::exists(status)) return;
  const bool is_ours =
      std::filesystem::is_regular_file(status) && (is_saved_session(path) || is_saved_json(path));
  if (!is_ours)
    fail(Fault::user, "{}: is there already and is no saved conversation; choose another name",
         printable(path, 400));
}

}  // namespace lily::cli
