// A conversation as the chat template takes it, and reading one from the JSON of a request.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lily::text {

struct ContentPart {
  enum class Kind { text, image, video };
  Kind kind = Kind::text;
  std::string text;  // of a text part

  bool operator==(const ContentPart&) const = default;
};

struct ToolCall {
  std::string name;
  // An object for the template; normalise() turns the string that clients send into one. Absent: no
  // parameters.
  std::optional<nlohmann::ordered_json> arguments;
  std::string id = {};  // as the client knows it; the template does not write it

  bool operator==(const ToolCall&) const = default;
};

struct Message {
  std::string role;
  std::vector<ContentPart> content;  // parts are joined without separator; empty for null
  std::optional<std::string> reasoning_content;
  std::vector<ToolCall> tool_calls;
  // False for a user turn that asks nothing (a later system message): thinking of earlier turns outlives it.
  bool is_query = true;

  static Message of(std::string role, std::string text) {
    return {std::move(role), {{ContentPart::Kind::text, std::move(text)}}, {}, {}, true};
  }
  bool operator==(const Message&) const = default;
};

// Reads the `messages` of a request in the form of OpenAI's chat completions: content as string, null or
// parts (text, input_text, output_text, refusal; images and videos are kept as such parts), reasoning_content
// or else reasoning, tool_calls with the function inside or bare, legacy function roles. Throws
// Error(Fault::user) naming messages[i].
std::vector<Message> parse_messages(const nlohmann::ordered_json& messages);

}  // namespace lily::text
