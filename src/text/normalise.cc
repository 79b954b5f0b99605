#include "text/normalise.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/printable.h"
#include "text/json_text.h"
#include "text/unicode.h"

namespace lily::text {
namespace {

constexpr std::string_view kBillingHeader = "x-anthropic-billing-header:";

std::string joined_text(const Message& message, size_t index) {
  std::string text;
  for (const ContentPart& part : message.content) {
    if (part.kind != ContentPart::Kind::text)
      fail(Fault::user, "messages[{}]: {} are not supported: this engine reads text only", index,
           part.kind == ContentPart::Kind::image ? "images" : "videos");
    text += part.text;
  }
  return text;
}

// The arguments as an object; nothing if there are none.
std::optional<ordered_json> as_object(std::optional<ordered_json> arguments) {
  if (!arguments || arguments->is_null() || arguments->is_object()) {
    if (arguments && arguments->is_null()) return std::nullopt;
    return arguments;
  }
  if (arguments->is_string()) {
    const auto& text = arguments->get_ref<const std::string&>();
    if (strip(text).empty()) return std::nullopt;
    if (auto parsed = parse_json(text, kMaxValueDepth); parsed && parsed->is_object()) return parsed;
  }
  ordered_json wrapped = ordered_json::object();
  wrapped["arguments"] = *std::move(arguments);
  return wrapped;
}

std::string canonical_role(const std::string& role, size_t index) {
  if (role == "developer") return "system";
  if (role == "function") return "tool";
  if (role != "system" && role != "user" && role != "assistant" && role != "tool")
    fail(Fault::user,
         "messages[{}].role: \"{}\" is not one of system, developer, user, assistant, tool, function", index,
         printable(role));
  return role;
}

}  // namespace

Conversation normalise(std::vector<Message> messages, RenderOptions options) {
  Conversation out{{}, options};
  if (messages.empty()) fail(Fault::user, "messages: at least one message is needed");
  std::string system;
  bool has_system = false, at_start = true;
  for (size_t i = 0; i < messages.size(); ++i) {
    Message& message = messages[i];
    message.role = canonical_role(message.role, i);
    std::string text = joined_text(message, i);
    if (message.role == "system" && at_start) {
      if (has_system && !system.empty() && !text.empty()) system += "\n\n";
      system += text;
      has_system = true;
      continue;
    }
    at_start = false;
    if (message.role == "system") {
      message.role = "user";
      message.is_query = false;
      text.insert(0, "System: ");
    }
    if (message.role == "tool" && i == 0)
      fail(Fault::user, "messages[0]: a tool result needs the call it answers before it");
    message.content = {{ContentPart::Kind::text, std::move(text)}};
    for (ToolCall& call : message.tool_calls) call.arguments = as_object(std::move(call.arguments));
    out.messages.push_back(std::move(message));
  }
  if (has_system) out.messages.insert(out.messages.begin(), Message::of("system", std::move(system)));
  out.options.allow_no_query = true;
  const Message& last = out.messages.back();
  out.options.continue_last = last.role == "assistant" && last.tool_calls.empty();
  return out;
}

bool is_billing_header(std::string_view system_block) {
  const std::string_view text = strip(system_block);
  return text.starts_with(kBillingHeader) && text.find('\n') == std::string_view::npos;
}

}  // namespace lily::text
