#include "server/openai_fields.h"

#include <charconv>
#include <cmath>
#include <limits>

namespace lily::server {
namespace {

constexpr size_t kMaxStops = 16, kMaxTools = 1024, kMaxBiases = 4096;
constexpr int32_t kLowEffortTokens = 2048, kMediumEffortTokens = 8192;

std::optional<float> as_float(std::optional<double> value) {
  return value ? std::optional(static_cast<float>(*value)) : std::nullopt;
}

void parse_logit_bias(Body& body, const ServedModel& model, engine::SamplingOverrides& out) {
  const Json* bias = body.find("logit_bias");
  if (bias == nullptr) return;
  if (!bias->is_object()) body.fail("logit_bias", "an object of token ids and numbers is needed");
  if (bias->size() > kMaxBiases) body.fail("logit_bias", fmt::format("more than {} tokens", kMaxBiases));
  for (const auto& [key, value] : bias->items()) {
    int32_t id = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    if (error != std::errc() || end != key.data() + key.size() || id < 0 || id >= model.tokenizer.n_tokens())
      body.fail("logit_bias", fmt::format("'{}' is no token id; they go from 0 to {}", key.substr(0, 40),
                                          model.tokenizer.n_tokens() - 1));
    if (!value.is_number() || !(std::abs(value.get<double>()) <= 100))
      body.fail("logit_bias", fmt::format("the bias of token {} is no number from -100 to 100", id));
    out.logit_bias.emplace_back(id, static_cast<float>(value.get<double>()));
  }
}

std::string function_name(const Json& choice) {
  for (const Json* at :
       {&choice, choice.is_object() && choice.contains("function") ? &choice["function"] : nullptr})
    if (at != nullptr && at->is_object() && at->contains("name") && (*at)["name"].is_string())
      return (*at)["name"].get<std::string>();
  return {};
}

}  // namespace

engine::SamplingOverrides parse_sampling(Body& body, const ServedModel& model) {
  engine::SamplingOverrides out;
  out.temperature = as_float(body.number("temperature", 0, 2));
  out.top_p = as_float(body.number("top_p", 0, 1));
  out.min_p = as_float(body.number("min_p", 0, 1));
  if (const auto top_k = body.integer("top_k", -1, std::numeric_limits<int32_t>::max()))
    out.top_k = static_cast<int32_t>(std::max<int64_t>(*top_k, 0));  // -1 is off too
  out.presence_penalty = as_float(body.number("presence_penalty", -2, 2));
  out.frequency_penalty = as_float(body.number("frequency_penalty", -2, 2));
  out.repetition_penalty = as_float(body.number("repetition_penalty", 0.01, 10));
  if (const auto seed =
          body.integer("seed", std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()))
    out.seed = static_cast<uint64_t>(*seed);
  parse_logit_bias(body, model, out);
  return out;
}

std::vector<std::string> parse_stop(Body& body, const char* name) {
  const Json* stop = body.find(name);
  if (stop == nullptr) return {};
  std::vector<std::string> out;
  if (stop->is_string()) out.push_back(stop->get<std::string>());
  else if (!stop->is_array() || stop->size() > kMaxStops)
    body.fail(name, fmt::format("a string or up to {} of them are needed", kMaxStops));
  else
    for (const Json& item : *stop) {
      if (!item.is_string()) body.fail(name, "a string or a list of strings is needed");
      out.push_back(item.get<std::string>());
    }
  std::erase(out, "");
  return out;
}

Json parse_functions(const Json& tools, const std::string& path) {
  if (tools.size() > kMaxTools)
    throw ApiError::bad_field(path, fmt::format("{}: more than {} tools", path, kMaxTools));
  Json out = Json::array();
  std::set<std::string> names;
  for (size_t i = 0; i < tools.size(); ++i) {
    const std::string at = fmt::format("{}[{}]", path, i);
    const Json& tool = tools[i];
    Body fields(tool, at + ".");
    const std::string type = fields.text("type").value_or("function");
    if (type != "function")
      throw ApiError::bad_field(at + ".type",
                                fmt::format("{}.type: '{}' is not supported; only functions are", at, type));
    Json function = tool.contains("function") ? tool["function"] : tool;
    if (!tool.contains("function")) function.erase("type");
    Body inner(function, at + ".function.");
    const std::string name = inner.text("name").value_or("");
    // Names stand inside tags of the model's output.
    if (name.empty() || name.size() > 256 || name.find_first_of("<>\n\r") != std::string::npos)
      inner.fail("name", "a name of up to 256 characters without <, > and line ends is needed");
    if (!names.insert(name).second) inner.fail("name", fmt::format("two functions are named '{}'", name));
    const Json* parameters = inner.find("parameters");
    if (parameters != nullptr && !parameters->is_object())
      inner.fail("parameters", "a JSON schema is needed");
    out.push_back(tool.contains("function") ? tool : Json{{"type", "function"}, {"function", function}});
  }
  return out.empty() ? Json() : out;
}

engine::ToolChoice parse_tool_choice(Body& body, const Json& tools) {
  using Kind = engine::ToolChoice::Kind;
  engine::ToolChoice out;
  out.parallel = body.boolean("parallel_tool_calls", true);
  const Json* choice = body.find("tool_choice");
  if (choice == nullptr) return out;
  const auto needs_tools = [&] {
    if (tools.is_null()) body.fail("tool_choice", "there are no tools to choose from");
  };
  if (choice->is_string()) {
    const auto word = choice->get<std::string>();
    if (word == "auto") return out;
    if (word == "none") out.kind = Kind::none;
    else if (word == "required" || word == "any") out.kind = Kind::required, needs_tools();
    else
      body.fail("tool_choice",
                fmt::format("'{}' is none of auto, none, required and a function", word.substr(0, 40)));
    return out;
  }
  out.kind = Kind::named;
  out.name = function_name(*choice);
  needs_tools();
  for (const Json& tool : tools)
    if (tool["function"]["name"] == out.name) return out;
  body.fail("tool_choice", fmt::format("there is no function '{}' among the tools", out.name.substr(0, 80)));
}

engine::OutputFormat parse_format(Body format) {
  using Kind = engine::OutputFormat::Kind;
  const std::string type = format.text("type").value_or("text");
  if (type == "text") return {};
  if (type == "json_object") return {.kind = Kind::json_object, .schema = {}};
  if (type != "json_schema") format.fail("type", "text, json_object or json_schema is needed");
  const auto inner = format.object("json_schema");
  Body fields = inner ? *inner : format;
  const Json* schema = fields.find("schema");
  if (schema == nullptr || !(schema->is_object() || schema->is_boolean()))
    fields.fail("schema", "a JSON schema is needed");
  return {.kind = Kind::json_schema, .schema = *schema};
}

void apply_effort(const std::string& effort, const std::string& path, engine::Thinking& thinking) {
  if (effort == "none" || effort == "minimal") thinking.enabled = false;
  else if (effort == "low") thinking.budget = kLowEffortTokens;
  else if (effort == "medium") thinking.budget = kMediumEffortTokens;
  else if (effort != "high" && effort != "xhigh" && effort != "max")
    throw ApiError::bad_field(path, fmt::format("{}: '{}' is none of none, minimal, low, medium, high, xhigh",
                                                path, effort.substr(0, 40)));
}

}  // namespace lily::server
