// OpenAI's chat completions: each field of a request, each chunk of an answer.
#include <cmath>
#include <limits>

#include "server/openai_chat.h"
#include "tests/server/wire.h"

namespace lily::server {
namespace {
namespace chat_completions {

using engine::Finish;

Json base() { return Json::parse(R"({"messages": [{"role": "user", "content": "hi"}]})"); }

Json with(const char* members) {
  Json json = base();
  json.update(Json::parse(members));
  return json;
}

Call call_of(const Json& json) { return parse_chat_completion(parse_json(json.dump()), tiny_model()); }
engine::ChatRequest request_of(const Json& json) {
  return std::get<engine::ChatRequest>(call_of(json).request);
}
ApiError refused(const char* members) {
  return refusal_of([&] { call_of(with(members)); });
}

// ---- Requests

TEST(ChatRequest, WhatIsAbsentIsLeftToTheCheckpoint) {
  const Call call = call_of(base());
  const auto& r = std::get<engine::ChatRequest>(call.request);
  EXPECT_FALSE(call.stream);
  EXPECT_FALSE(r.sampling.temperature || r.sampling.top_p || r.sampling.top_k || r.sampling.seed ||
               r.max_tokens);
  EXPECT_TRUE(r.tools.is_null());
  EXPECT_TRUE(r.thinking.enabled);
  EXPECT_FALSE(r.thinking.budget);
  EXPECT_EQ(r.top_logprobs, -1);
  EXPECT_EQ(r.messages.size(), 1u);
  EXPECT_THAT(call.ignored, testing::IsEmpty());
}

TEST(ChatRequest, SamplingFieldsArrive) {
  const auto r =
      request_of(with(R"({"temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "presence_penalty": -2,
      "frequency_penalty": 2, "repetition_penalty": 1.1, "seed": 18446744073709551615, "logit_bias": {"5": -100}})"));
  EXPECT_EQ(r.sampling.temperature, 0.0f);
  EXPECT_EQ(r.sampling.top_p, 0.5f);
  EXPECT_EQ(r.sampling.top_k, 7);
  EXPECT_EQ(r.sampling.min_p, 0.1f);
  EXPECT_EQ(r.sampling.presence_penalty, -2.0f);
  EXPECT_EQ(r.sampling.frequency_penalty, 2.0f);
  EXPECT_EQ(r.sampling.repetition_penalty, 1.1f);
  EXPECT_EQ(r.sampling.seed, std::numeric_limits<uint64_t>::max());
  const std::vector<std::pair<int32_t, float>> bias = {{5, -100.0f}};
  EXPECT_EQ(r.sampling.logit_bias, bias);
  EXPECT_EQ(request_of(with(R"({"repeat_penalty": 1.2})")).sampling.repetition_penalty, 1.2f);
  EXPECT_EQ(request_of(with(R"({"top_k": -1})")).sampling.top_k, 0);
  // Clients ask so for the likeliest token alone, and a sampler takes no share of nothing.
  for (const char* none : {"0", "1e-300"})
    EXPECT_GT(*request_of(with(fmt::format(R"({{"top_p": {}}})", none).c_str())).sampling.top_p, 0.0f)
        << none;
  EXPECT_EQ(request_of(with(R"({"seed": -1})")).sampling.seed, std::numeric_limits<uint64_t>::max());
}

TEST(ChatRequest, ValuesOutOfRangeAreRefusedByName) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {R"({"temperature": 2.1})", "temperature"},
      {R"({"temperature": "hot"})", "temperature"},
      {R"({"top_p": 1.01})", "top_p"},
      {R"({"top_p": -0.1})", "top_p"},
      {R"({"top_k": -2})", "top_k"},
      {R"({"top_k": 1.5})", "top_k"},
      {R"({"min_p": 2})", "min_p"},
      {R"({"presence_penalty": 3})", "presence_penalty"},
      {R"({"frequency_penalty": -3})", "frequency_penalty"},
      {R"({"repetition_penalty": 0})", "repetition_penalty"},
      {R"({"max_tokens": 0})", "max_tokens"},
      {R"({"max_completion_tokens": -1})", "max_completion_tokens"},
      {R"({"seed": 1.5})", "seed"},
      {R"({"seed": 184467440737095516160})", "seed"},
      {R"({"logit_bias": {"99999999": 1}})", "logit_bias"},
      {R"({"logit_bias": {"x": 1}})", "logit_bias"},
      {R"({"logit_bias": {"1": 101}})", "logit_bias"},
      {R"({"logit_bias": [1]})", "logit_bias"},
      {R"({"stop": 5})", "stop"},
      {R"({"stop": ["a", 5]})", "stop"},
      {R"({"stop": ["1","2","3","4","5","6","7","8","9","10","11","12","13","14","15","16","17"]})", "stop"},
      {R"({"logprobs": 1})", "logprobs"},
      {R"({"logprobs": true, "top_logprobs": 21})", "top_logprobs"},
      {R"({"top_logprobs": 2})", "top_logprobs"},
      {R"({"stream": "yes"})", "stream"},
      {R"({"stream_options": 1})", "stream_options"},
      {R"({"n": 2})", "n"},
      {R"({"n": 0})", "n"},
      {R"({"model": 7})", "model"},
      {R"({"messages": "hi"})", "messages"},
      {R"({"messages": null})", "messages"},
      {R"({"messages": []})", "messages"},
      {R"({"reasoning_effort": "extreme"})", "reasoning_effort"},
      {R"({"thinking_budget": -2})", "thinking_budget"},
      {R"({"chat_template_kwargs": {"enable_thinking": "no"}})", "chat_template_kwargs.enable_thinking"},
      {R"({"response_format": {"type": "xml"}})", "response_format.type"},
      {R"({"response_format": {"type": "json_schema"}})", "response_format.schema"},
      {R"({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}})",
       "response_format.json_schema.schema"},
  };
  for (const auto& [members, param] : cases) {
    const ApiError error = refused(members);
    EXPECT_EQ(error.status, 400) << members;
    EXPECT_EQ(error.type, "invalid_request_error") << members;
    EXPECT_EQ(error.param, param) << members;
    EXPECT_THAT(error.what(), testing::HasSubstr(param)) << members;
  }
}

TEST(ChatRequest, WhatWouldChangeTheAnswerAndIsNotSupportedIsRefusedByName) {
  for (const auto& [members, param] : std::vector<std::pair<const char*, const char*>>{
           {R"({"audio": {"voice": "x"}})", "audio"},
           {R"({"modalities": ["text", "audio"]})", "modalities"},
           {R"({"prediction": {"type": "content"}})", "prediction"},
           {R"({"functions": [{"name": "f"}]})", "functions"},
           {R"({"function_call": "auto"})", "function_call"},
           {R"({"web_search_options": {}})", "web_search_options"},
           {R"({"guided_json": {"type": "object"}})", "guided_json"},
           {R"({"grammar": "root ::= x"})", "grammar"},
           {R"({"ignore_eos": true})", "ignore_eos"},
           {R"({"min_tokens": 5})", "min_tokens"},
           {R"({"mirostat": 2})", "mirostat"},
           {R"({"typical_p": 0.9})", "typical_p"}})
    EXPECT_EQ(refused(members).param, param) << members;
  EXPECT_NO_THROW(call_of(with(R"({"modalities": ["text"], "audio": null, "n": 1})")));
  // What asks for nothing is no reason to refuse.
  EXPECT_NO_THROW(call_of(with(R"({"ignore_eos": false, "min_tokens": 0, "mirostat": 0, "typical_p": 1.0,
      "grammar": "", "guided_json": null, "top_n_sigma": -1.0})")));
}

TEST(ChatRequest, FieldsAboutTheCallerAreAcceptedAndUnknownOnesTold) {
  const Call call =
      call_of(with(R"({"user": "u", "metadata": {"a": "b"}, "store": true, "service_tier": "auto",
      "safety_identifier": "s", "prompt_cache_key": "k", "oddity": 1.2,
      "chat_template_kwargs": {"enable_thinking": false, "add_vision_id": true, "odd": 1}})"));
  EXPECT_THAT(call.ignored, testing::ElementsAre("chat_template_kwargs.odd", "oddity"));
  EXPECT_EQ(std::get<engine::ChatRequest>(call.request).cache_key, "k");
  EXPECT_FALSE(std::get<engine::ChatRequest>(call.request).thinking.enabled);
}

TEST(ChatRequest, TheNewerNameOfMaxTokensWins) {
  EXPECT_EQ(request_of(with(R"({"max_tokens": 5})")).max_tokens, 5);
  EXPECT_EQ(request_of(with(R"({"max_tokens": 5, "max_completion_tokens": 9})")).max_tokens, 9);
  EXPECT_EQ(request_of(with(R"({"max_completion_tokens": 9, "max_tokens": 5})")).max_tokens, 9);
}

TEST(ChatRequest, StopIsOneStringOrMany) {
  EXPECT_THAT(request_of(with(R"({"stop": "a"})")).stop, testing::ElementsAre("a"));
  EXPECT_THAT(request_of(with(R"({"stop": ["a", "b"]})")).stop, testing::ElementsAre("a", "b"));
  EXPECT_THAT(request_of(with(R"({"stop": null})")).stop, testing::IsEmpty());
}

TEST(ChatRequest, ThinkingIsSwitchedAndBounded) {
  const auto thinking = [](const char* members) { return request_of(with(members)).thinking; };
  for (const char* off : {"none", "minimal"})
    EXPECT_FALSE(thinking(fmt::format(R"({{"reasoning_effort": "{}"}})", off).c_str()).enabled);
  EXPECT_EQ(thinking(R"({"reasoning_effort": "low"})").budget, 2048);
  EXPECT_EQ(thinking(R"({"reasoning_effort": "medium"})").budget, 8192);
  EXPECT_EQ(thinking(R"({"reasoning_effort": "high"})").budget, std::nullopt);
  EXPECT_TRUE(thinking(R"({"reasoning_effort": "high"})").enabled);
  EXPECT_EQ(thinking(R"({"thinking_budget": 40})").budget, 40);
  EXPECT_EQ(thinking(R"({"thinking_budget_tokens": 40})").budget, 40);
  EXPECT_EQ(thinking(R"({"thinking": {"type": "enabled", "budget_tokens": 40}})").budget, 40);
  EXPECT_FALSE(thinking(R"({"thinking": {"type": "disabled"}})").enabled);
  for (const char* zero : {R"({"thinking_budget": 0})", R"({"thinking_budget": 0, "enable_thinking": true})",
                           R"({"thinking": {"type": "enabled", "budget_tokens": 0}})"})
    EXPECT_FALSE(thinking(zero).enabled) << zero;
  EXPECT_EQ(thinking(R"({"thinking_budget": -1, "reasoning_effort": "low"})").budget, std::nullopt);
  EXPECT_FALSE(thinking(R"({"enable_thinking": false})").enabled);
  EXPECT_FALSE(thinking(R"({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": false}})")
                   .enabled);
  EXPECT_TRUE(thinking(R"({"chat_template_kwargs": {"preserve_thinking": true}})").preserve);
  EXPECT_TRUE(thinking(R"({"preserve_thinking": true})").preserve);
}

TEST(ChatRequest, FormatsArrive) {
  using FormatKind = engine::OutputFormat::Kind;
  EXPECT_EQ(request_of(with(R"({"response_format": {"type": "text"}})")).format.kind, FormatKind::text);
  EXPECT_EQ(request_of(with(R"({"response_format": {"type": "json_object"}})")).format.kind,
            FormatKind::json_object);
  const auto format = request_of(with(R"({"response_format": {"type": "json_schema",
      "json_schema": {"name": "x", "strict": false, "schema": {"type": "object"}}}})"))
                          .format;
  EXPECT_EQ(format.kind, FormatKind::json_schema);
  EXPECT_EQ(format.schema, Json::parse(R"({"type": "object"})"));
}

constexpr const char* kTools =
    R"("tools": [{"function": {"name": "f", "parameters": {"b": 1, "a": 2}}, "type": "function"},
                                            {"type": "function", "function": {"name": "g", "description": "Größe <b>"}}])";

std::string tools_and(const std::string& more) { return std::string("{") + kTools + more + "}"; }

TEST(ChatRequest, ToolsStayAsTheyCame) {
  const auto r = request_of(with(tools_and("").c_str()));
  EXPECT_EQ(r.tools.dump(), R"([{"function":{"name":"f","parameters":{"b":1,"a":2}},"type":"function"},)"
                            R"({"type":"function","function":{"name":"g","description":"Größe <b>"}}])");
  EXPECT_TRUE(request_of(with(R"({"tools": []})")).tools.is_null());
}

TEST(ChatRequest, ToolsThatCannotBeAreRefusedByPath) {
  for (
      const auto& [tools, param] : std::vector<std::pair<const char*, const char*>>{
          {R"([{"type": "web_search"}])", "tools[0].type"},
          {R"([{"function": {"name": "f"}}])", "tools[0].type"},
          {R"([{"type": "function"}])", "tools[0].function"},
          {R"([{"type": "function", "function": {}}])", "tools[0].function.name"},
          {R"([{"type": "function", "function": {"name": "a b"}}])", "tools[0].function.name"},
          {R"([{"type": "function", "function": {"name": "a>"}}])", "tools[0].function.name"},
          {R"([{"type": "function", "function": {"name": 5}}])", "tools[0].function.name"},
          {R"([{"type": "function", "function": {"name": "f", "parameters": []}}])",
           "tools[0].function.parameters"},
          {R"([{"type": "function", "function": {"name": "f", "description": 1}}])",
           "tools[0].function.description"},
          {R"([{"type": "function", "function": {"name": "f", "strict": 1}}])", "tools[0].function.strict"},
          {R"([{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "f"}}])",
           "tools[1].function.name"},
          {R"({"f": 1})", "tools"},
          {R"([7])", "tools[0]"}})
    EXPECT_EQ(refused((std::string("{\"tools\": ") + tools + "}").c_str()).param, param) << tools;
}

TEST(ChatRequest, ToolChoices) {
  using ChoiceKind = engine::ToolChoice::Kind;
  const auto choice = [](const char* more) { return request_of(with(tools_and(more).c_str())).tool_choice; };
  EXPECT_EQ(choice("").kind, ChoiceKind::automatic);
  EXPECT_EQ(choice(R"(, "tool_choice": "none")").kind, ChoiceKind::none);
  EXPECT_FALSE(request_of(with(tools_and(R"(, "tool_choice": "none")").c_str())).tools.is_null());
  EXPECT_EQ(choice(R"(, "tool_choice": "required")").kind, ChoiceKind::required);
  const auto named = choice(R"(, "tool_choice": {"type": "function", "function": {"name": "g"}})");
  EXPECT_EQ(named.kind, ChoiceKind::named);
  EXPECT_EQ(named.name, "g");
  EXPECT_FALSE(choice(R"(, "parallel_tool_calls": false)").parallel);
  for (const char* bad :
       {R"({"tool_choice": "required"})", R"({"tool_choice": "sometimes"})", R"({"tool_choice": 3})"})
    EXPECT_THAT(refused(bad).param, testing::StartsWith("tool_choice")) << bad;
  EXPECT_EQ(
      refused(tools_and(R"(, "tool_choice": {"type": "function", "function": {"name": "x"}})").c_str()).param,
      "tool_choice");
  EXPECT_EQ(refused(tools_and(R"(, "tool_choice": {"type": "allowed_tools", "name": "g"})").c_str()).param,
            "tool_choice");
}

TEST(ChatRequest, FaultsInMessagesNameTheirPlace) {
  const auto param = [](const char* messages) {
    return refused((std::string("{\"messages\": ") + messages + "}").c_str()).param;
  };
  EXPECT_EQ(param(R"([{"role": "user", "content": "a"},
                      {"role": "user", "content": [{"type": "text", "text": "b"},
                       {"type": "image_url", "image_url": {"url": "data:,"}}]}])"),
            "messages[1].content[1]");
  EXPECT_EQ(param(R"([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}])"),
            "messages[0].content[0]");
  EXPECT_EQ(param(R"([{"role": "wizard", "content": "a"}])"), "messages[0].role");
  EXPECT_EQ(param(R"([{"content": "a"}])"), "messages[0].role");
  EXPECT_EQ(param(R"([{"role": "user", "content": 7}])"), "messages[0].content");
  EXPECT_EQ(param(R"([{"role": "user", "content": [{"type": "text"}]}])"), "messages[0].content[0].text");
  EXPECT_EQ(param(R"([{"role": "user", "content": [5]}])"), "messages[0].content[0]");
  EXPECT_EQ(param(R"([{"role": "tool", "content": "a"}])"), "messages[0]");
  EXPECT_EQ(
      param(R"([{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"function": {}}]}])"),
      "messages[1].tool_calls[0].name");
  EXPECT_EQ(param("[4]"), "messages[0]");
}

TEST(ChatRequest, ImageErrorsSayThatImagesAreNotSupported) {  // B085
  for (const char* type : {"image_url", "input_image", "input_audio", "file"}) {
    const ApiError error = refused(
        fmt::format(R"({{"messages": [{{"role": "user", "content": [{{"type": "{}"}}]}}]}})", type).c_str());
    EXPECT_EQ(error.param, "messages[0].content[0]") << type;
    EXPECT_THAT(error.what(), testing::HasSubstr("images are not supported")) << type;
  }
}

TEST(ChatRequest, EmptyStreamOptionsAreNone) {
  for (const char* options : {"{}", "null", R"({"include_usage": null})"}) {
    const Call call =
        call_of(with(fmt::format(R"({{"stream": true, "stream_options": {}}})", options).c_str()));
    call.writer->begin();
    const std::string last = call.writer->event(end_of(Finish::stop));
    EXPECT_EQ(last.find("\"usage\""), std::string::npos) << options;
  }
}

TEST(ChatRequest, ASchemaThatCannotBeHeldIsToldWithItsField) {
  const auto format = request_of(with(R"({"response_format": {"type": "json_schema",
      "json_schema": {"schema": {"type": "object"}}}})"))
                          .format;
  EXPECT_EQ(format.field, "response_format");
  const ApiError error = api_error_of(engine::SchemaRefused("tools[0].function", "no value fits"));
  EXPECT_EQ(error.status, 400);
  EXPECT_EQ(error.param, "tools[0].function");
}

// ---- Answers

TEST(ChatStream, ChunksComeInTheOrderOfTheContract) {
  Call call =
      call_of(with(R"({"stream": true, "model": "any name", "stream_options": {"include_usage": true}})"));
  EXPECT_TRUE(call.stream);
  const auto events = wire_events(streamed(*call.writer, thinking_text_call()));
  ASSERT_EQ(events.back().raw, "[DONE]");
  std::vector<Json> deltas;
  for (size_t i = 0; i + 2 < events.size(); ++i) {
    const Json chunk = events[i].data();
    EXPECT_EQ(events[i].name, "");
    EXPECT_EQ(chunk["object"], "chat.completion.chunk");
    EXPECT_EQ(chunk["model"], "any name");
    EXPECT_EQ(chunk["id"], events[0].data()["id"]);
    EXPECT_EQ(chunk["created"], events[0].data()["created"]);
    EXPECT_FALSE(chunk.contains("usage"));
    ASSERT_EQ(chunk["choices"].size(), 1u);
    EXPECT_EQ(chunk["choices"][0]["index"], 0);
    const bool is_last = i + 3 == events.size();
    EXPECT_EQ(chunk["choices"][0]["finish_reason"], is_last ? Json("tool_calls") : Json());
    EXPECT_EQ(chunk.contains("lily"), is_last);
    deltas.push_back(chunk["choices"][0]["delta"]);
  }
  const std::string id = deltas[5]["tool_calls"][0]["id"];
  EXPECT_EQ(id.size(), 29u);
  EXPECT_TRUE(id.starts_with("call_"));
  const std::vector<Json> expected = {
      Json::parse(R"({"role": "assistant", "content": ""})"),
      Json::parse(R"({"reasoning_content": "let me ", "reasoning": "let me "})"),
      Json::parse(R"({"reasoning_content": "see", "reasoning": "see"})"),
      Json::parse(R"({"content": "I "})"),
      Json::parse(R"({"content": "look."})"),
      {{"tool_calls", Json::array({{{"index", 0},
                                    {"id", id},
                                    {"type", "function"},
                                    {"function", {{"name", "ls"}, {"arguments", ""}}}}})}},
      Json::parse(R"({"tool_calls": [{"index": 0, "function": {"arguments": "{\"pa"}}]})"),
      Json::parse(R"({"tool_calls": [{"index": 0, "function": {"arguments": "th\": \"/tmp\"}"}}]})"),
      Json::object()};
  EXPECT_EQ(deltas, expected);
  const Json usage = events[events.size() - 2].data();
  EXPECT_EQ(usage["choices"], Json::array());  // B074
  EXPECT_EQ(usage["usage"], Json::parse(R"({"prompt_tokens": 20, "completion_tokens": 7, "total_tokens": 27,
      "prompt_tokens_details": {"cached_tokens": 5}, "completion_tokens_details": {"reasoning_tokens": 2}})"));
}

TEST(ChatStream, WithoutIncludeUsageNoChunkHasIt) {  // B073, B074
  for (const char* options : {"{}", "null", R"({"include_usage": false})", R"({"include_usage": null})"}) {
    Call call = call_of(with(fmt::format(R"({{"stream": true, "stream_options": {}}})", options).c_str()));
    const std::string stream = streamed(*call.writer, thinking_text_call());
    EXPECT_EQ(stream.find("\"usage\""), std::string::npos) << options;
    EXPECT_TRUE(stream.ends_with("data: [DONE]\n\n"));
  }
}

TEST(ChatStream, AModelMayBeNamedLikeWhatChangesInAChunk) {
  Call call = call_of(with(R"({"stream": true, "model": "\u001f\",\"delta\":\"\u001f"})"));
  const auto events =
      wire_events(streamed(*call.writer, {piece({{Kind::reasoning, -1, "a\x1f\"b"}}),
                                          piece({{Kind::content, -1, "\x1f"}}), end_of(Finish::stop)}));
  ASSERT_GE(events.size(), 4u);
  for (size_t i = 0; i + 1 < events.size(); ++i)
    EXPECT_EQ(events[i].data()["model"], "\x1f\",\"delta\":\"\x1f");
  EXPECT_EQ(
      events[1].data()["choices"][0],
      Json::parse(R"({"index": 0, "delta": {"reasoning_content": "a\u001f\"b", "reasoning": "a\u001f\"b"},
                            "logprobs": null, "finish_reason": null})"));
  EXPECT_EQ(events[2].data()["choices"][0]["delta"], Json::parse(R"({"content": "\u001f"})"));
}

TEST(ChatStream, AnAnswerOfCallsAloneHasNoContentDelta) {  // B040, B041
  Call call = call_of(with(R"({"stream": true})"));
  const std::vector<engine::AnswerEvent> answer = {
      piece({{Kind::call_begin, 0, "f"}, {Kind::call_arguments, 0, "{}"}, {Kind::call_end, 0, ""}}),
      piece({{Kind::call_begin, 1, "g"}, {Kind::call_arguments, 1, "{}"}, {Kind::call_end, 1, ""}}),
      end_of(Finish::stop, 2)};
  const auto events = wire_events(streamed(*call.writer, answer));
  for (size_t i = 1; i + 1 < events.size(); ++i)
    EXPECT_FALSE(events[i].data()["choices"][0]["delta"].contains("content")) << events[i].raw;
  const Json message = call.writer->whole()["choices"][0]["message"];
  EXPECT_TRUE(message["content"].is_null());
  ASSERT_EQ(message["tool_calls"].size(), 2u);
  EXPECT_NE(message["tool_calls"][0]["id"], message["tool_calls"][1]["id"]);
  EXPECT_FALSE(message["tool_calls"][0].contains("index"));
  EXPECT_FALSE(message.contains("reasoning"));
}

TEST(ChatStream, ALongCallIsManyFragments) {  // B050
  Call call = call_of(with(R"({"stream": true})"));
  std::vector<engine::AnswerEvent> answer = {piece({{Kind::call_begin, 0, "write"}})};
  std::string arguments = R"({"text": ")" + std::string(2000, 'x') + "\"}";
  for (size_t i = 0; i < arguments.size(); i += 40)
    answer.emplace_back(piece({{Kind::call_arguments, 0, arguments.substr(i, 40)}}));
  answer.emplace_back(piece({{Kind::call_end, 0, ""}}));
  answer.emplace_back(end_of(Finish::stop, 1));
  std::string joined;
  int n_fragments = 0;
  for (const WireEvent& event : wire_events(streamed(*call.writer, answer))) {
    if (event.raw == "[DONE]") continue;
    const Json delta = event.data()["choices"][0]["delta"];
    if (!delta.contains("tool_calls") || delta["tool_calls"][0].contains("id")) continue;
    EXPECT_FALSE(delta["tool_calls"][0].contains("type"));
    EXPECT_FALSE(delta["tool_calls"][0]["function"].contains("name"));
    joined += delta["tool_calls"][0]["function"]["arguments"];
    ++n_fragments;
  }
  EXPECT_GT(n_fragments, 20);
  EXPECT_EQ(joined, arguments);
  EXPECT_EQ(call.writer->whole()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"],
            arguments);
}

TEST(ChatStream, AFailureIsAnErrorWithoutDone) {
  Call call = call_of(with(R"({"stream": true})"));
  std::string stream = call.writer->begin();
  stream += call.writer->failure({500, "server_error", "", "", "the device has failed"});
  const auto events = wire_events(stream);
  EXPECT_EQ(events.back().data(), Json::parse(R"({"error": {"message": "the device has failed",
      "type": "server_error", "param": null, "code": null}})"));
}

TEST(ChatStream, KeepAliveIsAComment) { EXPECT_EQ(call_of(base()).writer->keep_alive(), ": keep-alive\n\n"); }

TEST(ChatStream, ProgressComesOnRequest) {
  const engine::AnswerEvent progress = engine::PromptProgress{.n_done = 3, .n_total = 9, .n_cached = 1};
  EXPECT_EQ(call_of(base()).writer->event(progress), "");
  const Json chunk =
      wire_events(call_of(with(R"({"return_progress": true})")).writer->event(progress))[0].data();
  EXPECT_EQ(chunk["choices"], Json::array());
  EXPECT_EQ(chunk["lily"]["progress"], Json::parse(R"({"done": 3, "total": 9, "cached": 1})"));
}

TEST(ChatAnswer, FinishReasons) {
  const auto reason = [](engine::AnswerEnd end) {
    const Call call = call_of(base());
    call.writer->event(end);
    return call.writer->whole()["choices"][0]["finish_reason"].get<std::string>();
  };
  EXPECT_EQ(reason(end_of(Finish::stop)), "stop");
  EXPECT_EQ(reason(end_of(Finish::length)), "length");
  EXPECT_EQ(reason(end_of(Finish::stop, 1)), "tool_calls");
  EXPECT_EQ(reason(end_of(Finish::length, 1)), "length");
}

TEST(ChatAnswer, AnAnswerCutInItsThinkingHasEmptyContent) {  // B055
  const Call call = call_of(base());
  call.writer->event(piece({{Kind::reasoning, -1, "hm"}}));
  call.writer->event(end_of(Finish::length));
  const Json message = call.writer->whole()["choices"][0]["message"];
  EXPECT_EQ(message["content"], "");
  EXPECT_EQ(message["reasoning_content"], "hm");
  EXPECT_EQ(message["reasoning"], "hm");
}

TEST(ChatAnswer, LilyTellsTimesCacheSeedAndDetail) {
  const Call call = call_of(base());
  engine::AnswerEnd end = end_of(Finish::stop);
  end.detail = engine::AnswerEnd::Detail::loop;
  end.timings = {.queued_ms = 1, .prefill_ms = 100, .ttft_ms = 101, .decode_ms = 60};
  end.cache_source = "ram";
  end.cache_miss = "the tools differ";
  call.writer->event(end);
  EXPECT_EQ(call.writer->whole()["lily"],
            Json::parse(R"({"queued_ms": 1.0, "prefill_ms": 100.0, "ttft_ms": 101.0,
      "decode_ms": 60.0, "prefill_tps": 150.0, "decode_tps": 100.0,
      "cache": {"hit_tokens": 5, "source": "ram", "miss_reason": "the tools differ"}, "seed": 42,
      "stop_detail": "loop"})"));
}

TEST(ChatLogprobs, EachTokenHasItsBytesAndComesOnce) {
  const Call call = call_of(with(R"({"logprobs": true, "top_logprobs": 1, "stream": true})"));
  EXPECT_EQ(std::get<engine::ChatRequest>(call.request).top_logprobs, 1);
  const std::vector<int32_t> ids = tiny_tokenizer().encode("\xF0\x9F\x98\x80 ok", text::AddedTokens::none);
  ASSERT_GE(ids.size(), 3u);
  std::string stream = call.writer->begin();
  // The first token shows nothing yet: its values go with the next chunk.
  for (size_t i = 0; i < ids.size(); ++i) {
    engine::AnswerPiece p;
    p.tokens.push_back({.id = ids[i], .logprob = -0.5f, .top = {{ids[i], -0.5f}}});
    if (i > 0) p.events.push_back({Kind::content, -1, "x"});
    stream += call.writer->event(p);
  }
  engine::AnswerPiece silent;
  silent.tokens.push_back({.id = ids[0], .logprob = -std::numeric_limits<float>::infinity()});
  stream += call.writer->event(silent);
  stream += call.writer->event(end_of(Finish::stop));
  Json joined = Json::array();
  for (const WireEvent& event : wire_events(stream)) {
    if (event.raw == "[DONE]") continue;
    const Json logprobs = event.data()["choices"][0]["logprobs"];
    if (logprobs.is_null()) continue;
    EXPECT_TRUE(logprobs["refusal"].is_null());
    for (const Json& token : logprobs["content"]) joined.push_back(token);
  }
  EXPECT_EQ(joined, call.writer->whole()["choices"][0]["logprobs"]["content"]);
  ASSERT_EQ(joined.size(), ids.size() + 1);
  std::string bytes;
  for (size_t i = 0; i < ids.size(); ++i)
    for (const Json& byte : joined[i]["bytes"]) bytes += static_cast<char>(byte.get<int>());
  EXPECT_EQ(bytes, "\xF0\x9F\x98\x80 ok");
  EXPECT_EQ(joined[0]["top_logprobs"][0]["logprob"], -0.5);
  EXPECT_EQ(joined.back()["logprob"], -9999.0);
}

}  // namespace chat_completions
}  // namespace
}  // namespace lily::server
