#include "server/openai_fields.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "base/printable.h"
#include "server/transcript.h"
#include "text/json_text.h"

namespace lily::server {
namespace {

constexpr size_t kMaxStops = 16, kMaxTools = 1024, kMaxBiases = 4096, kMaxNameBytes = 256;
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

// Any integer of 64 bits, with a sign or without.
std::optional<uint64_t> parse_seed(Body& body) {
  const Json* seed = body.find("seed");
  if (seed == nullptr) return {};
  if (seed->is_number_unsigned()) return seed->get<uint64_t>();
  return static_cast<uint64_t>(
      *body.integer("seed", std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()));
}

// What other engines offer, would change the answer and cannot be had here; each with the value that asks for
// nothing.
void refuse_what_others_have(Body& body) {
  for (const char* name : {"grammar", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
                           "structured_outputs", "json_schema"})
    body.refuse(name, "not supported; response_format with a json_schema holds an answer to a form", "");
  const std::pair<const char*, Json> others[] = {
      {"ignore_eos", false}, {"min_tokens", 0},      {"bad_words", Json::array()}, {"mirostat", 0},
      {"typical_p", 1},      {"xtc_probability", 0}, {"dry_multiplier", 0},        {"top_a", 0},
      {"top_n_sigma", -1},   {"tfs_z", 1},           {"prompt_logprobs", 0}};
  for (const auto& [name, harmless] : others) body.refuse(name, "not supported", harmless);
}

// A name that can stand inside the tags of the model's output.
bool is_function_name(const std::string& name) {
  if (name.empty() || name.size() > kMaxNameBytes) return false;
  for (const char c : name)
    if (static_cast<uint8_t>(c) <= ' ' || c == '<' || c == '>' || c == '"' || c == '=' || c == '\x7f')
      return false;
  return true;
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
  if (out.top_p)
    out.top_p = std::max(*out.top_p, std::numeric_limits<float>::min());  // 0: the likeliest alone
  out.min_p = as_float(body.number("min_p", 0, 1));
  if (const auto top_k = body.integer("top_k", -1, std::numeric_limits<int32_t>::max()))
    out.top_k = static_cast<int32_t>(std::max<int64_t>(*top_k, 0));  // -1 is off too
  out.presence_penalty = as_float(body.number("presence_penalty", -2, 2));
  out.frequency_penalty = as_float(body.number("frequency_penalty", -2, 2));
  out.repetition_penalty = as_float(body.number("repetition_penalty", 0.01, 10));
  const auto other_name = as_float(body.number("repeat_penalty", 0.01, 10));
  if (!out.repetition_penalty) out.repetition_penalty = other_name;
  refuse_what_others_have(body);
  out.seed = parse_seed(body);
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

void Functions::add(const Body& fields, const char* schema, Json tool) {
  if (request_.tool_places.size() == kMaxTools)
    throw ApiError::bad_field("tools", fmt::format("tools: more than {} tools", kMaxTools));
  const Json& function = tool["function"];
  const auto named = function.find("name");
  const std::string name = named != function.end() && named->is_string() ? named->get<std::string>() : "";
  if (!is_function_name(name))
    fields.fail("name", fmt::format("'{}' is no function name: 1 to {} bytes without white space and <>\"=",
                                    printable(name, 40), kMaxNameBytes));
  if (!names_.insert(name).second) fields.fail("name", fmt::format("two functions are named '{}'", name));
  const auto parameters = function.find("parameters");
  if (parameters != function.end() && !parameters->is_null() && !parameters->is_object())
    fields.fail(schema, "a JSON schema is an object");
  request_.tools.push_back(std::move(tool));
  request_.tool_places.push_back({.name = fields.path_of("name"), .schema = fields.path_of(schema)});
}

void parse_functions(const Json& tools, engine::ChatRequest& request) {
  Functions functions(request);
  for (size_t i = 0; i < tools.size(); ++i) {
    Body fields(tools[i], fmt::format("tools[{}].", i));
    const std::string type = fields.text("type").value_or("");
    if (type != "function")
      fields.fail("type",
                  fmt::format("'{}' is not supported; tools are of the type function", printable(type, 40)));
    auto inner = fields.object("function");
    if (!inner) fields.fail("function", "an object with the function's name is needed");
    for (const char* name : {"name", "description"}) inner->text(name);
    inner->boolean("strict", false);
    functions.add(*inner, "parameters", tools[i]);
  }
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
  const std::string type = body.object("tool_choice")->text("type").value_or("");
  if (type != "function")
    body.fail("tool_choice", fmt::format("the type '{}' is not supported; function is", printable(type, 40)));
  out.kind = Kind::named;
  out.name = function_name(*choice);
  needs_tools();
  for (const Json& tool : tools)
    if (tool["function"]["name"] == out.name) return out;
  body.fail("tool_choice", fmt::format("there is no function '{}' among the tools", out.name.substr(0, 80)));
}

engine::OutputFormat parse_format(Body format) {
  using Kind = engine::OutputFormat::Kind;
  engine::OutputFormat out;
  out.field = format.path_of("");
  out.field.pop_back();  // the point behind it
  const std::string type = format.text("type").value_or("text");
  if (type == "text") return out;
  if (type == "json_object") {
    out.kind = Kind::json_object;
    return out;
  }
  if (type != "json_schema") format.fail("type", "text, json_object or json_schema is needed");
  const auto inner = format.object("json_schema");
  Body fields = inner ? *inner : format;
  fields.boolean("strict", false);  // enforced either way
  const Json* schema = fields.find("schema");
  if (schema == nullptr || !(schema->is_object() || schema->is_boolean()))
    fields.fail("schema", "a JSON schema is needed");
  out.kind = Kind::json_schema;
  out.schema = *schema;
  return out;
}

void apply_effort(const std::string& effort, const std::string& path, engine::Thinking& thinking) {
  thinking.enabled = effort != "none" && effort != "minimal";
  thinking.budget.reset();
  if (effort == "low") thinking.budget = kLowEffortTokens;
  else if (effort == "medium") thinking.budget = kMediumEffortTokens;
  else if (thinking.enabled && effort != "high" && effort != "xhigh" && effort != "max")
    throw ApiError::bad_field(
        path, fmt::format("{}: '{}' is none of none, minimal, low, medium, high, xhigh, max", path,
                          printable(effort, 40)));
}

void parse_thinking(Body& body, engine::Thinking& thinking, std::vector<std::string>& ignored) {
  bool is_zero = false;  // a budget of 0 is off, whatever else stands beside it
  const auto take_budget = [&](Body& from, const char* name) {
    const auto budget = from.integer(name, -1, std::numeric_limits<int32_t>::max());
    if (!budget) return;
    is_zero = *budget == 0;
    thinking.enabled = true;
    thinking.budget.reset();  // -1: no bound
    if (*budget > 0) thinking.budget = static_cast<int32_t>(*budget);
  };
  if (auto object = body.object("thinking")) {
    const std::string type = object->text("type").value_or("enabled");
    if (type != "enabled" && type != "adaptive" && type != "disabled")
      object->fail("type", fmt::format("'{}' is none of enabled, adaptive, disabled", printable(type, 40)));
    take_budget(*object, "budget_tokens");
    thinking.enabled = type != "disabled";
  }
  take_budget(body, "thinking_budget_tokens");
  take_budget(body, "thinking_budget");
  thinking.enabled = body.boolean("enable_thinking", thinking.enabled);
  thinking.preserve = body.boolean("preserve_thinking", thinking.preserve);
  if (auto kwargs = body.object("chat_template_kwargs")) {
    thinking.enabled = kwargs->boolean("enable_thinking", thinking.enabled);
    thinking.preserve = kwargs->boolean("preserve_thinking", thinking.preserve);
    kwargs->boolean("add_vision_id", false);  // numbers images, of which there are none
    add_ignored(ignored, kwargs->unknown());
  }
  if (is_zero) thinking.enabled = false;
}

std::vector<int32_t> parse_token_ids(const Body& body, const char* name, const Json& list, int32_t n_tokens) {
  std::vector<int32_t> ids;
  for (const Json& id : list) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= n_tokens)
      body.fail(name, fmt::format("'{}' at place {} is no token id; they go from 0 to {}",
                                  text::dump_json(id).substr(0, 40), ids.size(), n_tokens - 1));
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

std::optional<int32_t> parse_max_tokens(Body& body, const char* name) {
  const auto value = body.integer(name, 1, std::numeric_limits<int32_t>::max());
  return value ? std::optional(static_cast<int32_t>(*value)) : std::nullopt;
}

void refuse_several(Body& body, const char* name) {
  if (const auto n = body.integer(name, 1, 128); n && *n != 1)
    body.fail(name, "one choice a request is supported");
}

Json openai_usage(const engine::Usage& usage, int32_t reasoning_tokens) {
  return {{"prompt_tokens", usage.prompt_tokens},
          {"completion_tokens", usage.completion_tokens},
          {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
          {"prompt_tokens_details", {{"cached_tokens", usage.cached_tokens}}},
          {"completion_tokens_details", {{"reasoning_tokens", reasoning_tokens}}}};
}

Json chunk_of(Json head, Json choice) {
  head["choices"] = Json::array();
  head["choices"].push_back(std::move(choice));
  return head;
}

std::string closing_chunks(const Json& head, Json choice, const char* finish_reason,
                           const engine::AnswerEnd& end, const Json& usage) {
  choice["finish_reason"] = finish_reason;
  Json last = chunk_of(head, std::move(choice));
  last["lily"] = lily_details(end);
  std::string out = sse(last);
  if (!usage.is_null()) {
    Json figures = head;
    figures["choices"] = Json::array();
    figures["usage"] = usage;
    out += sse(figures);
  }
  return out + "data: [DONE]\n\n";
}

bool parse_stream(Body& body, Call& call) {
  call.stream = body.boolean("stream", false);
  auto options = body.object("stream_options");
  return options && options->boolean("include_usage", false);
}

void add_ignored(std::vector<std::string>& ignored, const std::vector<std::string>& names) {
  ignored.insert(ignored.end(), names.begin(), names.end());
}

}  // namespace lily::server
