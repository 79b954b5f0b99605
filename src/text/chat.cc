#include "text/chat.h"

#include <array>

#include "base/error.h"

namespace lily::text {
namespace {

using nlohmann::ordered_json;

const ordered_json* member(const ordered_json& object, const char* name) {
  const auto at = object.find(name);
  return at == object.end() || at->is_null() ? nullptr : &*at;
}

std::string string_member(const ordered_json& object, const char* name, const std::string& where) {
  const ordered_json* value = member(object, name);
  if (value == nullptr || !value->is_string()) fail(Fault::user, "{}.{}: a string is needed", where, name);
  return value->get<std::string>();
}

ContentPart parse_part(const ordered_json& part, const std::string& where) {
  if (!part.is_object()) fail(Fault::user, "{}: Unexpected item type in content.", where);
  const ordered_json* type_member = member(part, "type");
  const std::string type =
      type_member != nullptr && type_member->is_string() ? type_member->get<std::string>() : "";
  if (part.contains("image") || part.contains("image_url") || type == "image" || type == "input_image")
    return {ContentPart::Kind::image, {}};
  if (part.contains("video") || type == "video") return {ContentPart::Kind::video, {}};
  if (type == "refusal" && !part.contains("text"))
    return {ContentPart::Kind::text, string_member(part, "refusal", where)};
  if (part.contains("text")) return {ContentPart::Kind::text, string_member(part, "text", where)};
  if (type == "input_audio" || type == "file" || type == "input_file")
    fail(Fault::user, "{}: parts of type {} are not supported; images are not supported either", where, type);
  fail(Fault::user, "{}: Unexpected item type in content.", where);
}

std::vector<ContentPart> parse_content(const ordered_json& message, const std::string& where) {
  const ordered_json* content = member(message, "content");
  if (content == nullptr) return {};
  if (content->is_string()) return {{ContentPart::Kind::text, content->get<std::string>()}};
  if (!content->is_array()) fail(Fault::user, "{}.content: Unexpected content type.", where);
  std::vector<ContentPart> parts;
  for (const ordered_json& part : *content)
    parts.push_back(parse_part(part, fmt::format("{}.content[{}]", where, parts.size())));
  return parts;
}

std::vector<ToolCall> parse_tool_calls(const ordered_json& message, const std::string& where) {
  const ordered_json* list = member(message, "tool_calls");
  if (list == nullptr) return {};
  if (!list->is_array()) fail(Fault::user, "{}.tool_calls: a list is needed", where);
  std::vector<ToolCall> calls;
  for (const ordered_json& item : *list) {
    const std::string at = fmt::format("{}.tool_calls[{}]", where, calls.size());
    if (!item.is_object()) fail(Fault::user, "{}: an object is needed", at);
    const ordered_json* inner = member(item, "function");
    const ordered_json& call = inner == nullptr ? item : *inner;
    if (!call.is_object()) fail(Fault::user, "{}.function: an object is needed", at);
    ToolCall out{string_member(call, "name", at), std::nullopt};
    if (const auto arguments = call.find("arguments"); arguments != call.end()) out.arguments = *arguments;
    if (const ordered_json* id = member(item, "id"); id != nullptr && id->is_string())
      out.id = id->get<std::string>();
    calls.push_back(std::move(out));
  }
  return calls;
}

}  // namespace

std::vector<Message> parse_messages(const ordered_json& messages) {
  if (!messages.is_array()) fail(Fault::user, "messages: a list is needed");
  std::vector<Message> out;
  for (const ordered_json& message : messages) {
    const std::string where = fmt::format("messages[{}]", out.size());
    if (!message.is_object()) fail(Fault::user, "{}: an object is needed", where);
    Message parsed;
    parsed.role = string_member(message, "role", where);
    parsed.content = parse_content(message, where);
    if (parsed.role == "assistant") {
      for (const char* name : {"reasoning_content", "reasoning"})
        if (const ordered_json* value = member(message, name); value != nullptr && value->is_string()) {
          parsed.reasoning_content = value->get<std::string>();
          break;
        }
      parsed.tool_calls = parse_tool_calls(message, where);
    }
    out.push_back(std::move(parsed));
  }
  return out;
}

}  // namespace lily::text
