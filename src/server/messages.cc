#include "server/messages.h"

#include <algorithm>
#include <utility>

#include "base/printable.h"
#include "server/content.h"
#include "server/openai_fields.h"
#include "text/normalise.h"

namespace lily::server {
namespace {

// The `content` of one message, block by block, as the messages that the chat template knows.
class BlockReader {
 public:
  BlockReader(std::string role, std::vector<text::Message>& out) : role_(std::move(role)), out_(out) {}

  void read(const Json& block, const std::string& path) {
    Body body(block, path + ".");
    const std::string type = body.text("type").value_or("");
    if (type == "thinking" && is_assistant()) {
      open().reasoning_content = open().reasoning_content.value_or("") + body.text("thinking").value_or("");
    } else if (type == "redacted_thinking" && is_assistant()) {
      open();  // nobody can read it
    } else if (type == "tool_use" && is_assistant()) {
      const auto name = body.text("name");
      if (!name) body.fail("name", "a string is needed");
      const Json* input = body.find("input");
      open().tool_calls.push_back(
          {*name, input == nullptr ? Json::object() : *input, body.text("id").value_or("")});
    } else if (type == "tool_result" && role_ == "user") {
      std::string text = content_text(body.find("content"), path + ".content");
      if (body.boolean("is_error", false)) text.insert(0, "Error: ");
      open_ = false;
      out_.push_back(text::Message::of("tool", std::move(text)));
    } else if (type == "document") {
      read_document(body);
    } else {
      if (type.empty()) body.fail("type", "a string is needed");
      add_text(part_text(block, path));
    }
  }
  void add_text(std::string text) {
    open().content.push_back({text::ContentPart::Kind::text, std::move(text)});
  }

 private:
  bool is_assistant() const { return role_ == "assistant"; }

  void read_document(Body& body) {
    auto source = body.object("source");
    if (!source || source->text("type").value_or("") != "text")
      body.fail("source", "only documents of plain text are supported");
    add_text(source->text("data").value_or(""));
  }

  text::Message& open() {
    if (!open_) out_.push_back({.role = role_});
    open_ = true;
    return out_.back();
  }

  const std::string role_;
  std::vector<text::Message>& out_;
  bool open_ = false;
};

void read_message(const Json& message, const std::string& path, std::vector<text::Message>& out) {
  Body body(message, path + ".");
  const std::string role = body.text("role").value_or("");
  if (role != "user" && role != "assistant" && role != "system")
    body.fail("role", fmt::format("\"{}\" is not one of user, assistant, system", printable(role, 40)));
  const Json* content = body.find("content");
  if (content == nullptr) body.fail("content", "a string or a list of blocks is needed");
  if (content->is_string()) return out.push_back(text::Message::of(role, content->get<std::string>()));
  if (!content->is_array()) body.fail("content", "a string or a list of blocks is needed");
  const size_t before = out.size();
  BlockReader reader(role, out);
  for (size_t i = 0; i < content->size(); ++i)
    reader.read((*content)[i], fmt::format("{}.content[{}]", path, i));
  if (out.size() == before) out.push_back({.role = role});
}

void read_system(Body& body, bool keep_volatile, std::vector<text::Message>& out) {
  const Json* system = body.find("system");
  if (system == nullptr) return;
  if (system->is_string()) return out.push_back(text::Message::of("system", system->get<std::string>()));
  if (!system->is_array()) body.fail("system", "a string or a list of text blocks is needed");
  for (size_t i = 0; i < system->size(); ++i) {
    std::string text = part_text((*system)[i], fmt::format("system[{}]", i));
    // It differs in every request, and would make the cached prefix useless.
    if (keep_volatile || !text::is_billing_header(text))
      out.push_back(text::Message::of("system", std::move(text)));
  }
}

void read_tools(Body& body, engine::ChatRequest& request, std::vector<std::string>& ignored) {
  const Json* list = body.array("tools");
  if (list == nullptr) return;
  Functions functions(request);
  for (size_t i = 0; i < list->size(); ++i) {
    Body tool((*list)[i], fmt::format("tools[{}].", i));
    const std::string type = tool.text("type").value_or("custom");
    if (type != "custom") {
      ignored.push_back("tools of type " + printable(type, 40));
      continue;
    }
    const auto name = tool.text("name");
    if (!name) tool.fail("name", "a string is needed");
    Json function = {{"name", *name}};
    if (const auto description = tool.text("description")) function["description"] = *description;
    const Json* schema = tool.find("input_schema");
    if (schema != nullptr) function["parameters"] = *schema;
    if (tool.boolean("strict", false)) function["strict"] = true;
    functions.add(tool, "input_schema", {{"type", "function"}, {"function", std::move(function)}});
  }
}

engine::ToolChoice read_tool_choice(Body& body, const Json& tools) {
  using Kind = engine::ToolChoice::Kind;
  engine::ToolChoice choice;
  auto object = body.object("tool_choice");
  if (!object) return choice;
  const std::string type = object->text("type").value_or("");
  if (type == "none") choice.kind = Kind::none;
  else if (type == "any") choice.kind = Kind::required;
  else if (type == "tool") {
    choice.kind = Kind::named;
    choice.name = object->text("name").value_or("");
  } else if (type != "auto") {
    object->fail("type", fmt::format("\"{}\" is not one of auto, any, tool, none", printable(type, 40)));
  }
  const bool is_there = std::any_of(tools.begin(), tools.end(), [&](const Json& tool) {
    return choice.kind == Kind::required || tool["function"]["name"] == choice.name;
  });
  if ((choice.kind == Kind::required || choice.kind == Kind::named) && !is_there)
    body.fail("tool_choice", "there is no such tool to call");
  choice.parallel = !object->boolean("disable_parallel_tool_use", false);
  return choice;
}

// Both forms in which clients ask for JSON, and the effort.
void read_output(Body& body, engine::ChatRequest& request) {
  if (auto format = body.object("output_format")) request.format = parse_format(*std::move(format));
  auto config = body.object("output_config");
  if (!config) return;
  if (auto format = config->object("format")) request.format = parse_format(*std::move(format));
  if (const auto effort = config->text("effort");
      effort && request.thinking.enabled && !request.thinking.budget)
    apply_effort(*effort, "output_config.effort", request.thinking);
}

engine::ChatRequest read_request(Body& body, const ServedModel& model, std::vector<std::string>& ignored) {
  engine::ChatRequest request;
  read_system(body, model.keep_volatile, request.messages);
  const Json* messages = body.array("messages");
  if (messages == nullptr || messages->empty())
    body.fail("messages", "a list of at least one message is needed");
  for (size_t i = 0; i < messages->size(); ++i)
    read_message((*messages)[i], fmt::format("messages[{}]", i), request.messages);
  if (request.messages.front().role == "tool")
    body.fail("messages", "a tool_result needs the tool_use that it answers before it");

  read_tools(body, request, ignored);
  request.tool_choice = read_tool_choice(body, request.tools);

  // In this API nobody gets thinking blocks who has not asked for them.
  request.thinking.enabled = false;
  request.thinking.preserve = model.preserve_thinking;
  parse_thinking(body, request.thinking, ignored);
  read_output(body, request);
  if (const Json* servers = body.array("mcp_servers"); servers != nullptr && !servers->empty())
    body.fail("mcp_servers", "servers of tools are not supported");
  body.refuse("container", "containers are not supported");
  return request;
}

// Fields that say something about the caller, about caching or about money.
void pass_over(Body& body) {
  for (const char* name : {"metadata", "service_tier", "cache_control", "inference_geo", "betas"})
    body.find(name);
}

}  // namespace

Call parse_message(const Json& json, const ServedModel& model) {
  Body body(json);
  Call call;
  MessageAnswer answer{.model = body.text("model").value_or(model.id)};
  engine::ChatRequest request = read_request(body, model, call.ignored);
  request.sampling = parse_sampling(body, model);
  request.max_tokens = parse_max_tokens(body, "max_tokens");
  request.stop = parse_stop(body, "stop_sequences");
  answer.stop = request.stop;
  call.stream = body.boolean("stream", false);
  pass_over(body);
  add_ignored(call.ignored, body.unknown());
  call.request = std::move(request);
  call.writer = make_message_writer(std::move(answer));
  return call;
}

engine::ChatRequest parse_count_tokens(const Json& json, const ServedModel& model) {
  Body body(json);
  std::vector<std::string> ignored;
  return read_request(body, model, ignored);
}

}  // namespace lily::server
