#include "server/responses.h"

#include <utility>

#include "base/printable.h"
#include "server/openai_fields.h"

namespace lily::server {
namespace {

void refuse_what_is_not_supported(Body& body) {
  body.refuse("conversation", "conversations are not kept; use previous_response_id");
  body.refuse("prompt", "prompt templates are not supported");
  body.refuse("background", "answers in the background are not supported", false);
  if (const auto truncation = body.text("truncation"); truncation && *truncation != "disabled")
    body.fail("truncation", "only \"disabled\" is supported: nothing is cut from a conversation silently");
  if (const auto n = body.integer("top_logprobs", 0, 20); n && *n > 0)
    body.fail("top_logprobs", "log-probabilities are supported by chat completions only");
  if (const Json* include = body.array("include"))
    for (const Json& what : *include)
      if (what == "message.output_text.logprobs")
        body.fail("include", "log-probabilities are supported by chat completions only");
}

// The tools as functions that the model sees, and how they are called on the wire.
class Tools {
 public:
  explicit Tools(engine::ChatRequest& request) : functions_(request) {}

  void read(const Json& list, const std::string& path, const std::string& name_space,
            std::vector<std::string>& ignored) {
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string at = fmt::format("{}[{}]", path, i);
      Body tool(list[i], at + ".");
      const std::string type = tool.text("type").value_or("");
      if (type == "function") add_function(tool, name_space);
      else if (type == "custom") add_custom(tool, name_space);
      else if (type == "namespace" && name_space.empty()) {
        const Json* inner = tool.array("tools");
        const auto name = tool.text("name");
        if (!name || name->empty()) tool.fail("name", "a string is needed");
        if (inner != nullptr) read(*inner, at + ".tools", *name, ignored);
      } else if (type.empty() || type == "namespace") {
        tool.fail("type", "the type of a tool is needed");
      } else {
        ignored.push_back("tools of type " + printable(type, 40));  // run by OpenAI's servers
      }
    }
  }

  std::map<std::string, WireTool> take_names() { return std::move(names_); }
  // The name that the model sees; empty if there is no such tool.
  std::string find(const std::string& name, const std::string& name_space) const {
    for (const auto& [flat, wire] : names_)
      if (wire.name == name && (name_space.empty() || wire.name_space == name_space)) return flat;
    return {};
  }

 private:
  void add(const Body& tool, Json function, const std::string& name_space, bool is_custom) {
    const auto name = function["name"].get<std::string>();
    function["name"] = flat_name(name_space, name);
    names_[function["name"].get<std::string>()] = {name, name_space, is_custom};
    functions_.add(tool, "parameters", {{"type", "function"}, {"function", std::move(function)}});
  }

  static Json named(Body& tool) {
    const auto name = tool.text("name");
    if (!name) tool.fail("name", "a string is needed");
    Json function = {{"name", *name}};
    if (const auto description = tool.text("description")) function["description"] = *description;
    return function;
  }

  void add_function(Body& tool, const std::string& name_space) {
    Json function = named(tool);
    if (const Json* parameters = tool.find("parameters")) function["parameters"] = *parameters;
    if (tool.boolean("strict", false)) function["strict"] = true;
    add(tool, std::move(function), name_space, false);
  }

  // Free text is one parameter. A grammar cannot be enforced; the model can read it.
  void add_custom(Body& tool, const std::string& name_space) {
    Json function = named(tool);
    if (auto format = tool.object("format"); format && format->text("type").value_or("text") == "grammar") {
      const std::string syntax = format->text("syntax").value_or("");
      const std::string definition = format->text("definition").value_or("");
      std::string description = function.value("description", std::string());
      description += fmt::format("\n\nThe input follows this {} grammar:\n{}", syntax, definition);
      function["description"] = std::move(description);
    }
    function["parameters"] = {{"type", "object"},
                              {"properties", {{kCustomInput, {{"type", "string"}}}}},
                              {"required", Json::array({kCustomInput})}};
    add(tool, std::move(function), name_space, true);
  }

  Functions functions_;
  std::map<std::string, WireTool> names_;
};

engine::ToolChoice read_tool_choice(Body& body, const Tools& tools, bool has_tools) {
  using Kind = engine::ToolChoice::Kind;
  engine::ToolChoice choice;
  choice.parallel = body.boolean("parallel_tool_calls", true);
  const Json* value = body.find("tool_choice");
  if (value == nullptr || *value == "auto") return choice;
  if (*value == "none") {
    choice.kind = Kind::none;
  } else if (*value == "required") {
    choice.kind = Kind::required;
    if (!has_tools) body.fail("tool_choice", "there are no tools to choose from");
  } else {
    auto object = body.object("tool_choice");
    const std::string type = object->text("type").value_or("");
    if (type != "function" && type != "custom")
      object->fail("type",
                   fmt::format("\"{}\" is not supported; function and custom are", printable(type, 40)));
    choice.kind = Kind::named;
    choice.name = tools.find(object->text("name").value_or(""), object->text("namespace").value_or(""));
    if (choice.name.empty()) object->fail("name", "there is no such function among the tools");
  }
  return choice;
}

void read_format(Body& body, engine::OutputFormat& format) {
  auto text = body.object("text");
  if (!text) return;
  text->text("verbosity");
  if (auto inner = text->object("format")) format = parse_format(*inner);
}

Json or_null(const Json* value) { return value == nullptr ? Json() : plain_numbers(*value); }

Json or_default(const Json* value, Json otherwise) {
  return value == nullptr ? std::move(otherwise) : plain_numbers(*value);
}

// What the response object repeats.
Json echo_of(Body& body, const ServedModel& model, bool store) {
  Json echo = {{"model", body.text("model").value_or(model.id)}};
  for (const char* name : {"instructions", "max_output_tokens", "max_tool_calls", "previous_response_id",
                           "prompt_cache_key", "safety_identifier", "temperature", "top_p", "user"})
    echo[name] = or_null(body.find(name));
  echo["parallel_tool_calls"] = body.boolean("parallel_tool_calls", true);
  echo["reasoning"] = or_default(body.find("reasoning"), {{"effort", nullptr}, {"summary", nullptr}});
  echo["text"] = or_default(body.find("text"), {{"format", {{"type", "text"}}}});
  echo["tool_choice"] = or_default(body.find("tool_choice"), "auto");
  echo["tools"] = or_default(body.find("tools"), Json::array());
  echo["metadata"] = or_default(body.find("metadata"), Json::object());
  echo["service_tier"] = "default";
  echo["top_logprobs"] = 0;
  echo["truncation"] = "disabled";
  echo["store"] = store;
  return echo;
}

}  // namespace

Call parse_response(const Json& json, const ServedModel& model, ResponseStore& store) {
  Body body(json);
  Call call;
  engine::ChatRequest request;
  ResponseAnswer answer;
  refuse_what_is_not_supported(body);

  if (const auto previous = body.text("previous_response_id")) {
    auto stored = store.find(*previous);
    if (!stored)
      throw ApiError(404, "not_found_error", "previous_response_not_found", "previous_response_id",
                     fmt::format("there is no stored response \"{}\"; send the whole conversation as input",
                                 printable(*previous, 80)));
    answer.messages = std::move(stored->messages);
  }
  const Json* input = body.find("input");
  if (input == nullptr) body.fail("input", "a string or a list of items is needed");
  append_input(*input, answer.messages);
  if (const auto instructions = body.text("instructions"))
    request.messages.push_back(text::Message::of("system", *instructions));
  request.messages.insert(request.messages.end(), answer.messages.begin(), answer.messages.end());

  Tools tools(request);
  if (const Json* list = body.array("tools")) tools.read(*list, "tools", "", call.ignored);
  request.tool_choice = read_tool_choice(body, tools, !request.tools.is_null());
  answer.tools = tools.take_names();

  request.thinking.preserve = model.preserve_thinking;
  if (auto reasoning = body.object("reasoning"))
    if (const auto effort = reasoning->text("effort"))
      apply_effort(*effort, "reasoning.effort", request.thinking);
  parse_thinking(body, request.thinking, call.ignored);
  read_format(body, request.format);
  request.sampling = parse_sampling(body, model);
  request.max_tokens = parse_max_tokens(body, "max_output_tokens");
  request.stop = parse_stop(body, "stop");
  request.cache_key = body.text("prompt_cache_key").value_or("");

  const bool keeps = body.boolean("store", true);
  if (keeps) answer.store = &store;
  answer.echo = echo_of(body, model, keeps);
  call.stream = body.boolean("stream", false);
  for (const char* name : {"service_tier", "stream_options", "prompt_cache_retention"}) body.find(name);
  add_ignored(call.ignored, body.unknown());
  call.request = std::move(request);
  call.writer = make_response_writer(std::move(answer));
  return call;
}

}  // namespace lily::server
