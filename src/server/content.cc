#include "server/content.h"

#include "base/printable.h"

namespace lily::server {

std::string part_text(const Json& part, const std::string& path) {
  Body body(part, path + ".");
  const std::string type = body.text("type").value_or("text");
  if (type == "refusal") return body.text("refusal").value_or(body.text("text").value_or(""));
  const bool is_text = type == "text" || type == "input_text" || type == "output_text" ||
                       type == "summary_text" || type == "reasoning_text";
  if (!is_text) {
    const bool is_image = type.find("image") != std::string::npos;
    throw ApiError::bad_field(
        path, is_image
                  ? fmt::format("{}: images are not supported: this engine reads text only", path)
                  : fmt::format("{}: the type is \"{}\"; audio, files and images are not supported: this "
                                "engine reads text only",
                                path, printable(type, 40)));
  }
  const auto text = body.text("text");
  if (!text) body.fail("text", "a string is needed");
  return *text;
}

std::string content_text(const Json* content, const std::string& path) {
  if (content == nullptr || content->is_null()) return {};
  if (content->is_string()) return content->get<std::string>();
  if (!content->is_array()) throw ApiError::bad_field(path, path + ": a string or a list of parts is needed");
  std::string out;
  for (size_t i = 0; i < content->size(); ++i)
    out += part_text((*content)[i], fmt::format("{}[{}]", path, i));
  return out;
}

}  // namespace lily::server
