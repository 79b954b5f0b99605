// Anthropic's messages: each block of a request, each event of an answer.
#include "server/messages.h"

#include "tests/server/wire.h"

namespace lily::server {
namespace {
namespace messages {

using engine::Finish;

Json base() {
  return Json::parse(R"({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]})");
}

Json with(const std::string& members) {
  Json json = base();
  json.update(Json::parse(members));
  return json;
}

Call call_of(const Json& json) { return parse_message(parse_json(json.dump()), tiny_model()); }
engine::ChatRequest request_of(const Json& json) {
  return std::get<engine::ChatRequest>(call_of(json).request);
}
ApiError refused(const std::string& members) {
  return refusal_of([&] { call_of(with(members)); });
}

text::Message assistant(std::string text) { return text::Message::of("assistant", std::move(text)); }

// ---- Requests

TEST(MessageRequest, FieldsArrive) {
  const Call call =
      call_of(with(R"({"stream": true, "stop_sequences": ["a", "b"], "temperature": 0.5, "top_p": 0.9,
      "top_k": 4, "metadata": {"user_id": "u"}, "service_tier": "auto", "system": "Be brief."})"));
  const auto& r = std::get<engine::ChatRequest>(call.request);
  EXPECT_TRUE(call.stream);
  EXPECT_EQ(r.max_tokens, 9);
  EXPECT_THAT(r.stop, testing::ElementsAre("a", "b"));
  EXPECT_EQ(r.sampling.temperature, 0.5f);
  EXPECT_EQ(r.sampling.top_k, 4);
  EXPECT_THAT(r.messages, testing::ElementsAre(text::Message::of("system", "Be brief."),
                                               text::Message::of("user", "hi")));
  EXPECT_THAT(call.ignored, testing::IsEmpty());
}

TEST(MessageRequest, BlocksBecomeMessages) {
  const auto r = request_of(with(R"({"messages": [
      {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]},
      {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {"b": 1, "a": 2}},
        {"type": "tool_use", "id": "toolu_2", "name": "pwd", "input": {}}]},
      {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": "gone", "is_error": true},
        {"type": "tool_result", "tool_use_id": "toolu_3"},
        {"type": "text", "text": "go on"}]},
      {"role": "system", "content": "late"},
      {"role": "user", "content": []}]})"));
  text::Message said = assistant("I look.");
  said.reasoning_content = "hm";
  said.tool_calls = {{"ls", Json::parse(R"({"b": 1, "a": 2})"), "toolu_1"},
                     {"pwd", Json::object(), "toolu_2"}};
  text::Message first{
      .role = "user",
      .content = {{text::ContentPart::Kind::text, "a"}, {text::ContentPart::Kind::text, "b"}}};
  EXPECT_THAT(r.messages,
              testing::ElementsAre(first, said, text::Message::of("tool", "xy"),
                                   text::Message::of("tool", "Error: gone"), text::Message::of("tool", ""),
                                   text::Message::of("user", "go on"), text::Message::of("system", "late"),
                                   text::Message{.role = "user"}));
}

TEST(MessageRequest, ABillingHeaderLeavesNoTrace) {  // B026
  const auto messages = [](const std::string& hash) {
    return request_of(
               with(
                   R"({"system": [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=)" +
                   hash + R"(;"}, {"type": "text", "text": "You are C."}]})"))
        .messages;
  };
  EXPECT_EQ(messages("1"), messages("2"));
  EXPECT_EQ(messages("1")[0], text::Message::of("system", "You are C."));
  EXPECT_EQ(messages("1").size(), 2u);
}

TEST(MessageRequest, ABillingHeaderStaysWhereThatIsAskedFor) {
  ServedModel model = tiny_model();
  model.keep_volatile = true;
  const Json body = with(R"({"system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}]})");
  const Call call = parse_message(parse_json(body.dump()), model);
  EXPECT_EQ(std::get<engine::ChatRequest>(call.request).messages[0],
            text::Message::of("system", "x-anthropic-billing-header: cch=1;"));
}

TEST(MessageRequest, ToolsBecomeFunctions) {
  const Call call = call_of(with(R"({"tools": [
      {"name": "ls", "description": "Lists.", "input_schema": {"type": "object", "properties": {"z": {}, "a": {}}}, "cache_control": {"type": "ephemeral"}},
      {"type": "web_search_20250305", "name": "web_search"},
      {"type": "custom", "name": "pwd", "input_schema": {}, "strict": true}]})"));
  const auto& r = std::get<engine::ChatRequest>(call.request);
  EXPECT_EQ(
      r.tools.dump(),
      R"([{"type":"function","function":{"name":"ls","description":"Lists.","parameters":{"type":"object","properties":{"z":{},"a":{}}}}},)"
      R"({"type":"function","function":{"name":"pwd","parameters":{},"strict":true}}])");
  EXPECT_THAT(call.ignored, testing::ElementsAre("tools of type web_search_20250305"));
}

TEST(MessageRequest, ToolChoices) {
  using ChoiceKind = engine::ToolChoice::Kind;
  const auto choice = [](const std::string& value) {
    return request_of(with(R"({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": )" + value + "}"))
        .tool_choice;
  };
  EXPECT_EQ(choice("null").kind, ChoiceKind::automatic);
  EXPECT_EQ(choice(R"({"type": "auto"})").kind, ChoiceKind::automatic);
  EXPECT_EQ(choice(R"({"type": "none"})").kind, ChoiceKind::none);
  EXPECT_EQ(choice(R"({"type": "any"})").kind, ChoiceKind::required);
  EXPECT_EQ(choice(R"({"type": "tool", "name": "f"})").kind, ChoiceKind::named);
  EXPECT_EQ(choice(R"({"type": "tool", "name": "f"})").name, "f");
  EXPECT_FALSE(choice(R"({"type": "auto", "disable_parallel_tool_use": true})").parallel);
  EXPECT_EQ(refused(R"({"tool_choice": {"type": "any"}})").param, "tool_choice");
  EXPECT_EQ(refused(R"({"tools": [{"name": "f"}], "tool_choice": {"type": "tool", "name": "g"}})").param,
            "tool_choice");
  EXPECT_EQ(refused(R"({"tool_choice": {"type": "some"}})").param, "tool_choice.type");
}

TEST(MessageRequest, ThinkingIsOffUnlessAskedFor) {
  EXPECT_FALSE(request_of(base()).thinking.enabled);
  const auto thinking = [](const std::string& value) { return request_of(with(value)).thinking; };
  EXPECT_TRUE(thinking(R"({"thinking": {"type": "enabled", "budget_tokens": 1024}})").enabled);
  EXPECT_EQ(thinking(R"({"thinking": {"type": "enabled", "budget_tokens": 1024}})").budget, 1024);
  EXPECT_TRUE(thinking(R"({"thinking": {"type": "adaptive"}})").enabled);
  EXPECT_FALSE(thinking(R"({"thinking": {"type": "enabled", "budget_tokens": 0}})").enabled);
  EXPECT_EQ(thinking(R"({"thinking": {"type": "adaptive"}})").budget, std::nullopt);
  EXPECT_FALSE(thinking(R"({"thinking": {"type": "disabled"}})").enabled);
  EXPECT_EQ(thinking(R"({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}})").budget,
            2048);
  EXPECT_FALSE(thinking(R"({"output_config": {"effort": "high"}})").enabled);
  EXPECT_EQ(refused(R"({"thinking": {"type": "maybe"}})").param, "thinking.type");
  EXPECT_EQ(refused(R"({"thinking": {"type": "enabled", "budget_tokens": "many"}})").param,
            "thinking.budget_tokens");
}

TEST(MessageRequest, StructuredOutputInBothForms) {
  for (const char* form :
       {R"({"output_format": {"type": "json_schema", "schema": {"type": "object"}}})",
        R"({"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}})"}) {
    const auto format = request_of(with(form)).format;
    EXPECT_EQ(format.kind, engine::OutputFormat::Kind::json_schema) << form;
    EXPECT_EQ(format.schema, Json::parse(R"({"type": "object"})"));
    EXPECT_THAT(format.field, testing::AnyOf("output_format", "output_config.format"));
  }
}

TEST(MessageRequest, FaultsNameTheirPlace) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"({"messages": []})", "messages"},
      {R"({"messages": null})", "messages"},
      {R"({"messages": [1]})", "messages[0]"},
      {R"({"messages": [{"role": "tool", "content": "a"}]})", "messages[0].role"},
      {R"({"messages": [{"role": "user"}]})", "messages[0].content"},
      {R"({"messages": [{"role": "user", "content": 5}]})", "messages[0].content"},
      {R"({"messages": [{"role": "user", "content": ["a"]}]})", "messages[0].content[0]"},
      {R"({"messages": [{"role": "user", "content": [{"text": "a"}]}]})", "messages[0].content[0].type"},
      {R"({"messages": [{"role": "user", "content": [{"type": "text"}]}]})", "messages[0].content[0].text"},
      {R"({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]})",
       "messages[0].content[0]"},
      {R"({"messages": [{"role": "user", "content": [{"type": "tool_use", "name": "f"}]}]})",
       "messages[0].content[0]"},
      {R"({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]})",
       "messages[0].content[0].name"},
      {R"({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]})",
       "messages"},
      {R"({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "tool_result",
           "content": [{"type": "image"}]}]}]})",
       "messages[1].content[0].content[0]"},
      {R"({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]})",
       "messages[0].content[0].source"},
      {R"({"system": 5})", "system"},
      {R"({"system": [{"type": "image"}]})", "system[0]"},
      {R"({"max_tokens": 0})", "max_tokens"},
      {R"({"tools": [{"description": "x"}]})", "tools[0].name"},
      {R"({"tools": [{"name": "a"}, {"name": "a"}]})", "tools[1].name"},
      {R"({"mcp_servers": [{"url": "x"}]})", "mcp_servers"},
      {R"({"container": "x"})", "container"},
  };
  for (const auto& [members, param] : cases) {
    const ApiError error = refused(members);
    EXPECT_EQ(error.status, 400) << members;
    EXPECT_EQ(error.param, param) << members;
  }
}

TEST(MessageRequest, CountingTokensReadsTheSameRequest) {
  const auto request = parse_count_tokens(
      with(R"({"system": "s", "tools": [{"name": "f", "input_schema": {}}]})"), tiny_model());
  EXPECT_EQ(request.messages.size(), 2u);
  EXPECT_EQ(request.tools.size(), 1u);
}

TEST(MessageError, HasTheShapeAndTheWordsOfItsApi) {  // B076
  ApiError error(400, "invalid_request_error", "context_length_exceeded", "messages", "too long");
  error.more = {{"n_prompt_tokens", 5000}, {"n_ctx", 4096}};
  EXPECT_EQ(anthropic_error(error, "req_1"),
            Json::parse(R"({"type": "error", "error": {"type": "invalid_request_error",
                "message": "prompt is too long: 5000 tokens > 4096 maximum"}, "request_id": "req_1"})"));
  EXPECT_EQ(anthropic_error({500, "server_error", "", "", "x"}, "r")["error"]["type"], "api_error");
}

// ---- Answers

TEST(MessageStream, EventsComeInTheOrderOfTheContract) {
  const Call call = call_of(with(R"({"stream": true})"));
  const auto events = wire_events(streamed(*call.writer, thinking_text_call()));
  std::vector<std::string> names;
  for (const WireEvent& event : events) {
    names.push_back(event.name);
    EXPECT_EQ(event.data()["type"], event.name);
  }
  EXPECT_THAT(names, testing::ElementsAre("message_start", "content_block_start", "content_block_delta",
                                          "content_block_delta", "content_block_delta", "content_block_stop",
                                          "content_block_start", "content_block_delta", "content_block_delta",
                                          "content_block_stop", "content_block_start", "content_block_delta",
                                          "content_block_delta", "content_block_stop", "message_delta",
                                          "message_stop"));
  const Json start = events[0].data()["message"];
  EXPECT_TRUE(start["id"].get<std::string>().starts_with("msg_"));
  EXPECT_EQ(start["model"], "m");
  EXPECT_EQ(start["content"], Json::array());
  EXPECT_TRUE(start["stop_reason"].is_null());
  EXPECT_EQ(start["usage"], Json::parse(R"({"input_tokens": 15, "cache_creation_input_tokens": 0,
      "cache_read_input_tokens": 5, "output_tokens": 0})"));
  EXPECT_EQ(events[1].data()["content_block"],
            Json::parse(R"({"type": "thinking", "thinking": "", "signature": ""})"));
  EXPECT_EQ(events[2].data()["delta"], Json::parse(R"({"type": "thinking_delta", "thinking": "let me "})"));
  EXPECT_EQ(events[4].data()["delta"]["type"], "signature_delta");
  EXPECT_FALSE(events[4].data()["delta"]["signature"].get<std::string>().empty());
  EXPECT_EQ(events[6].data()["content_block"], Json::parse(R"({"type": "text", "text": ""})"));
  EXPECT_EQ(events[7].data()["delta"], Json::parse(R"({"type": "text_delta", "text": "I "})"));
  const Json tool = events[10].data()["content_block"];
  EXPECT_TRUE(tool["id"].get<std::string>().starts_with("toolu_"));
  EXPECT_EQ(tool["name"], "ls");
  EXPECT_EQ(tool["input"], Json::object());
  EXPECT_EQ(events[11].data()["delta"],
            Json::parse(R"({"type": "input_json_delta", "partial_json": "{\"pa"})"));
  const std::vector<int> indices = {0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2};
  for (size_t i = 0; i < indices.size(); ++i) EXPECT_EQ(events[i + 1].data()["index"], indices[i]);
  EXPECT_EQ(events[14].data()["delta"], Json::parse(R"({"stop_reason": "tool_use", "stop_sequence": null})"));
  EXPECT_EQ(events[14].data()["usage"]["output_tokens"], 7);
}

TEST(MessageStream, WithoutProgressTheFirstPieceStartsTheMessage) {
  const Call call = call_of(base());
  EXPECT_EQ(call.writer->begin(), "");
  const auto events = wire_events(call.writer->event(piece({{Kind::content, -1, "x"}})));
  EXPECT_EQ(events[0].name, "message_start");
  EXPECT_EQ(events[1].name, "content_block_start");
}

TEST(MessageStream, AnEmptyAnswerStartsAndStops) {
  const Call call = call_of(base());
  const auto events = wire_events(streamed(*call.writer, {end_of(Finish::stop)}));
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0].name, "message_start");
  EXPECT_EQ(events[1].name, "message_delta");
  EXPECT_EQ(call.writer->whole()["content"], Json::array());
}

TEST(MessageStream, PingAndErrorEvents) {
  const Call call = call_of(base());
  EXPECT_EQ(call.writer->keep_alive(), "event: ping\ndata: {\"type\":\"ping\"}\n\n");
  const auto events = wire_events(call.writer->failure({500, "server_error", "", "", "broken"}));
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].name, "error");
  EXPECT_EQ(events[0].data()["error"], Json::parse(R"({"type": "api_error", "message": "broken"})"));
}

TEST(MessageAnswer, StopReasons) {
  const auto reason = [](engine::AnswerEnd end) {
    const Call call = call_of(with(R"({"stop_sequences": ["x", "END"]})"));
    call.writer->event(end);
    const Json whole = call.writer->whole();
    return std::pair(whole["stop_reason"].get<std::string>(), whole["stop_sequence"]);
  };
  EXPECT_EQ(reason(end_of(Finish::stop)), std::pair(std::string("end_turn"), Json()));
  EXPECT_EQ(reason(end_of(Finish::length)).first, "max_tokens");
  EXPECT_EQ(reason(end_of(Finish::stop, 1)).first, "tool_use");
  engine::AnswerEnd full = end_of(Finish::length);
  full.context_full = true;
  EXPECT_EQ(reason(full).first, "model_context_window_exceeded");
  engine::AnswerEnd stopped = end_of(Finish::stop);
  stopped.stop_string = 1;
  EXPECT_EQ(reason(stopped), std::pair(std::string("stop_sequence"), Json("END")));
}

TEST(MessageAnswer, TheInputOfACutCallIsNotHalfOfIt) {
  const Call call = call_of(base());
  call.writer->event(
      piece({{Kind::call_begin, 0, "write"}, {Kind::call_arguments, 0, "{\"text\": \"half of"}}));
  call.writer->event(end_of(Finish::length));
  const Json whole = call.writer->whole();
  EXPECT_EQ(whole["stop_reason"], "max_tokens");
  EXPECT_EQ(whole["content"][0]["input"], Json::object());
}

}  // namespace messages
}  // namespace
}  // namespace lily::server
