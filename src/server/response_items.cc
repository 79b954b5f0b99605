// The input items of the Responses API as messages of a conversation.
#include <utility>

#include "base/printable.h"
#include "server/content.h"
#include "server/responses.h"

namespace lily::server {
namespace {

class ItemReader {
 public:
  explicit ItemReader(std::vector<text::Message>& out) : out_(out) {}

  void read(const Json& item, const std::string& path) {
    Body body(item, path + ".");
    const std::string type = body.text("type").value_or("message");
    if (type == "message") read_message(body, path);
    else if (type == "reasoning") read_reasoning(body, path);
    else if (type == "function_call") {
      const Json* arguments = body.find("arguments");
      add_call(body, arguments == nullptr ? Json::object() : *arguments);
    } else if (type == "custom_tool_call") {
      add_call(body, {{kCustomInput, body.text("input").value_or("")}});
    } else if (type == "function_call_output" || type == "custom_tool_call_output") {
      const Json* output = body.find("output");
      if (output == nullptr) body.fail("output", "a string or a list of parts is needed");
      if (out_.empty()) body.fail("type", "an output needs the call that it answers before it");
      is_open_ = false;
      out_.push_back(text::Message::of("tool", content_text(output, path + ".output")));
    } else {
      body.fail("type", fmt::format("items of the type \"{}\" are not supported", printable(type, 40)));
    }
  }

 private:
  void read_message(Body& body, const std::string& path) {
    const std::string role = body.text("role").value_or("");
    if (role != "user" && role != "assistant" && role != "system" && role != "developer")
      body.fail("role",
                fmt::format("\"{}\" is not one of user, assistant, system, developer", printable(role, 40)));
    std::string text = content_text(body.find("content"), path + ".content");
    if (role == "assistant") {
      open_assistant().content.push_back({text::ContentPart::Kind::text, std::move(text)});
      return;
    }
    is_open_ = false;
    out_.push_back(text::Message::of(role == "developer" ? "system" : role, std::move(text)));
  }

  // The thinking itself, else its summary, which is the same text here.
  void read_reasoning(Body& body, const std::string& path) {
    const auto parts = [&](const char* name) {
      const Json* list = body.array(name);
      return list == nullptr ? std::string() : content_text(list, path + "." + name);
    };
    std::string text = parts("content");
    std::string summary = parts("summary");
    if (text.empty()) text = std::move(summary);
    const bool goes_on = is_open_ && (!out_.back().content.empty() || !out_.back().tool_calls.empty());
    if (goes_on) is_open_ = false;  // another answer begins
    text::Message& message = open_assistant();
    if (!text.empty()) message.reasoning_content = message.reasoning_content.value_or("") + text;
  }

  void add_call(Body& body, Json arguments) {
    const auto name = body.text("name");
    if (!name || name->empty()) body.fail("name", "a string is needed");
    open_assistant().tool_calls.push_back({flat_name(body.text("namespace").value_or(""), *name),
                                           std::move(arguments), body.text("call_id").value_or("")});
  }

  // Thinking, text and calls that follow one another are one answer.
  text::Message& open_assistant() {
    if (!is_open_) out_.push_back({.role = "assistant"});
    is_open_ = true;
    return out_.back();
  }

  std::vector<text::Message>& out_;
  bool is_open_ = false;  // the last message is an assistant's that more may be added to
};

}  // namespace

std::string flat_name(const std::string& name_space, const std::string& name) {
  if (name_space.empty()) return name;
  return name_space + (name_space.ends_with("__") ? "" : "__") + name;
}

void append_input(const Json& input, std::vector<text::Message>& messages) {
  if (input.is_string()) {
    messages.push_back(text::Message::of("user", input.get<std::string>()));
    return;
  }
  if (!input.is_array() || input.empty())
    throw ApiError::bad_field("input", "input: a string or a list of items is needed");
  ItemReader reader(messages);
  for (size_t i = 0; i < input.size(); ++i) reader.read(input[i], fmt::format("input[{}]", i));
}

}  // namespace lily::server
