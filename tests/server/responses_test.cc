// OpenAI's responses: items of a request, events of an answer, stored answers.
#include "server/responses.h"

#include "server/text_field.h"
#include "tests/server/wire.h"

namespace lily::server {
namespace {
namespace responses {

using engine::Finish;

class Responses : public testing::Test {
 protected:
  Call call_of(const std::string& json) { return parse_response(parse_json(json), tiny_model(), store_); }
  engine::ChatRequest request_of(const std::string& json) {
    return std::get<engine::ChatRequest>(call_of(json).request);
  }
  ApiError refused(const std::string& json) {
    return refusal_of([&] { call_of(json); });
  }
  ResponseStore store_;
};

// ---- Requests

TEST_F(Responses, FieldsArrive) {
  const Call call =
      call_of(R"({"model": "m", "input": "hi", "instructions": "Be brief.", "max_output_tokens": 1,
      "temperature": 0.5, "top_p": 0.9, "stream": true, "store": false, "include": ["reasoning.encrypted_content"],
      "prompt_cache_key": "k", "truncation": "disabled", "reasoning": {"effort": "low", "summary": "auto"},
      "text": {"format": {"type": "json_schema", "name": "n", "strict": true, "schema": {"type": "object"}}, "verbosity": "low"},
      "parallel_tool_calls": false, "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "service_tier": "auto"})");
  const auto& r = std::get<engine::ChatRequest>(call.request);
  EXPECT_TRUE(call.stream);
  EXPECT_EQ(r.max_tokens, 1);  // B083
  EXPECT_EQ(r.sampling.temperature, 0.5f);
  EXPECT_EQ(r.cache_key, "k");
  EXPECT_EQ(r.thinking.budget, 2048);
  EXPECT_EQ(r.format.kind, engine::OutputFormat::Kind::json_schema);
  EXPECT_FALSE(r.tool_choice.parallel);
  EXPECT_THAT(r.messages, testing::ElementsAre(text::Message::of("system", "Be brief."),
                                               text::Message::of("user", "hi")));
  EXPECT_THAT(call.ignored, testing::IsEmpty());
}

TEST_F(Responses, ItemsBecomeMessages) {
  const auto r = request_of(R"({"input": [
      {"role": "developer", "content": "rules"},
      {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
      {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": null},
      {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
      {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": "{\"p\": 1}"},
      {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** Begin"},
      {"type": "function_call", "call_id": "c3", "name": "search", "namespace": "mcp__x", "arguments": ""},
      {"type": "function_call_output", "call_id": "c1", "output": "x"},
      {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
      {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
      {"type": "message", "role": "assistant", "content": "Done."}]})");
  text::Message user{.role = "user", .content = {{text::ContentPart::Kind::text, "ab"}}};
  text::Message first = text::Message::of("assistant", "I look.");
  first.reasoning_content = "hm";
  first.tool_calls = {{"ls", Json(R"({"p": 1})"), "c1"},
                      {"patch", Json::parse(R"({"input": "*** Begin"})"), "c2"},
                      {"mcp__x__search", Json(""), "c3"}};
  text::Message second = text::Message::of("assistant", "Done.");
  second.reasoning_content = "so";
  EXPECT_THAT(r.messages, testing::ElementsAre(text::Message::of("system", "rules"), user, first,
                                               text::Message::of("tool", "x"),
                                               text::Message::of("tool", "done"), second));
}

TEST_F(Responses, TwoAnswersInARowStayTwo) {
  const auto r = request_of(R"({"input": [{"role": "user", "content": "a"},
      {"type": "reasoning", "summary": [{"type": "summary_text", "text": "one"}]}, {"role": "assistant", "content": "1"},
      {"type": "reasoning", "summary": [{"type": "summary_text", "text": "two"}]}, {"role": "assistant", "content": "2"},
      {"role": "user", "content": "b"}]})");
  ASSERT_EQ(r.messages.size(), 4u);
  EXPECT_EQ(r.messages[1].reasoning_content, "one");
  EXPECT_EQ(r.messages[2].reasoning_content, "two");
}

TEST_F(Responses, ToolsOfAllKinds) {  // B080
  const Call call = call_of(R"({"input": "a", "tools": [
      {"type": "function", "name": "f", "description": "F.", "strict": false, "parameters": {"type": "object"}},
      {"type": "web_search"}, {"type": "image_generation"},
      {"type": "namespace", "name": "mcp__x", "tools": [{"type": "function", "name": "a"}, {"type": "function", "name": "b"}]},
      {"type": "custom", "name": "patch", "description": "Patches.", "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}}]})");
  const auto& tools = std::get<engine::ChatRequest>(call.request).tools;
  ASSERT_EQ(tools.size(), 4u);
  EXPECT_EQ(
      tools[0].dump(),
      R"({"type":"function","function":{"name":"f","description":"F.","parameters":{"type":"object"}}})");
  EXPECT_EQ(tools[1]["function"]["name"], "mcp__x__a");
  EXPECT_EQ(tools[2]["function"]["name"], "mcp__x__b");
  EXPECT_EQ(tools[3]["function"]["parameters"]["properties"]["input"]["type"], "string");
  EXPECT_THAT(tools[3]["function"]["description"].get<std::string>(), testing::HasSubstr("start: x"));
  EXPECT_THAT(call.ignored,
              testing::ElementsAre("tools of type web_search", "tools of type image_generation"));
}

TEST_F(Responses, ToolChoices) {
  using ChoiceKind = engine::ToolChoice::Kind;
  const std::string tools =
      R"({"input": "a", "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
      {"type": "custom", "name": "c"}], "tool_choice": )";
  EXPECT_EQ(request_of(tools + "\"none\"}").tool_choice.kind, ChoiceKind::none);
  EXPECT_EQ(request_of(tools + "\"required\"}").tool_choice.kind, ChoiceKind::required);
  EXPECT_EQ(request_of(tools + R"({"type": "custom", "name": "c"}})").tool_choice.name, "c");
  EXPECT_EQ(request_of(tools + R"({"type": "function", "name": "f"}})").tool_choice.name, "n__f");
  EXPECT_EQ(refused(tools + R"({"type": "function", "name": "g"}})").param, "tool_choice.name");
  EXPECT_EQ(refused(tools + R"({"type": "web_search"}})").param, "tool_choice.type");
  EXPECT_EQ(refused(tools + "7}").param, "tool_choice");
  EXPECT_EQ(refused(R"({"input": "a", "tool_choice": "required"})").param, "tool_choice");
}

TEST_F(Responses, FaultsNameTheirPlace) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"({})", "input"},
      {R"({"input": []})", "input"},
      {R"({"input": 5})", "input"},
      {R"({"input": [5]})", "input[0]"},
      {R"({"input": [{"type": "item_reference", "id": "x"}]})", "input[0].type"},
      {R"({"input": [{"role": "tool", "content": "a"}]})", "input[0].role"},
      {R"({"input": [{"role": "user", "content": [{"type": "input_image"}]}]})", "input[0].content[0]"},
      {R"({"input": [{"role": "user", "content": [{"type": "input_file"}]}]})", "input[0].content[0]"},
      {R"({"input": [{"type": "function_call", "arguments": "{}"}]})", "input[0].name"},
      {R"({"input": [{"type": "function_call_output", "output": "x"}]})", "input[0].type"},
      {R"({"input": "a", "truncation": "auto"})", "truncation"},
      {R"({"input": "a", "background": true})", "background"},
      {R"({"input": "a", "conversation": "c"})", "conversation"},
      {R"({"input": "a", "prompt": {"id": "p"}})", "prompt"},
      {R"({"input": "a", "top_logprobs": 3})", "top_logprobs"},
      {R"({"input": "a", "include": ["message.output_text.logprobs"]})", "include"},
      {R"({"input": "a", "max_output_tokens": 0})", "max_output_tokens"},
      {R"({"input": "a", "reasoning": {"effort": "much"}})", "reasoning.effort"},
      {R"({"input": "a", "text": {"format": {"type": "xml"}}})", "text.format.type"},
      {R"({"input": "a", "tools": [{"name": "f"}]})", "tools[0].type"},
      {R"({"input": "a", "tools": [{"type": "function"}]})", "tools[0].name"},
      {R"({"input": "a", "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "f"}]})",
       "tools[1].name"},
  };
  for (const auto& [json, param] : cases) {
    const ApiError error = refused(json);
    EXPECT_EQ(error.status, 400) << json;
    EXPECT_EQ(error.param, param) << json;
  }
}

// ---- Answers

std::vector<std::string> types_of(const std::vector<WireEvent>& events) {
  std::vector<std::string> types;
  for (size_t i = 0; i < events.size(); ++i) {
    const Json data = events[i].data();
    EXPECT_EQ(data["type"], events[i].name);
    EXPECT_EQ(data["sequence_number"], i);
    types.push_back(events[i].name.substr(std::string("response.").size()));
  }
  return types;
}

TEST_F(Responses, EventsComeInTheOrderOfTheContract) {  // B082
  const Call call = call_of(
      R"({"model": "m", "input": "a", "stream": true, "tools": [{"type": "function", "name": "ls"}]})");
  const auto events = wire_events(streamed(*call.writer, thinking_text_call()));
  EXPECT_THAT(types_of(events),
              testing::ElementsAre("created", "in_progress",                                         //
                                   "output_item.added", "reasoning_summary_part.added",              //
                                   "reasoning_summary_text.delta", "reasoning_text.delta",           //
                                   "reasoning_summary_text.delta", "reasoning_text.delta",           //
                                   "reasoning_summary_text.done", "reasoning_text.done",             //
                                   "reasoning_summary_part.done", "output_item.done",                //
                                   "output_item.added", "content_part.added", "output_text.delta",   //
                                   "output_text.delta", "output_text.done", "content_part.done",     //
                                   "output_item.done",                                               //
                                   "output_item.added", "function_call_arguments.delta",             //
                                   "function_call_arguments.delta", "function_call_arguments.done",  //
                                   "output_item.done", "completed"));
  for (size_t i = 2; i + 1 < events.size(); ++i)
    EXPECT_EQ(events[i].data()["output_index"], i < 12 ? 0 : i < 19 ? 1 : 2) << i;
  const Json response = events.back().data()["response"];
  EXPECT_EQ(response, call.writer->whole());
  EXPECT_EQ(response["status"], "completed");
  EXPECT_EQ(response["id"], events[0].data()["response"]["id"]);
  ASSERT_EQ(response["output"].size(), 3u);
  EXPECT_EQ(response["output"][0], events[11].data()["item"]);
  EXPECT_EQ(response["output"][1], events[18].data()["item"]);
  EXPECT_EQ(response["output"][2], events[23].data()["item"]);
  EXPECT_EQ(response["output"][0]["summary"][0]["text"], "let me see");
  EXPECT_EQ(response["output"][1]["content"][0]["text"], "I look.");
  EXPECT_EQ(response["output"][2]["name"], "ls");
  EXPECT_EQ(response["output"][2]["arguments"], R"({"path": "/tmp"})");
  EXPECT_EQ(events[22].data()["arguments"], R"({"path": "/tmp"})");
  EXPECT_EQ(events[22].data()["item_id"], response["output"][2]["id"]);
  EXPECT_EQ(response["usage"],
            Json::parse(R"({"input_tokens": 20, "input_tokens_details": {"cached_tokens": 5},
      "output_tokens": 7, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 27})"));
}

TEST_F(Responses, ACustomToolGetsItsTextUnescaped) {
  const Call call = call_of(R"({"input": "a", "tools": [{"type": "custom", "name": "patch"}]})");
  const std::string input = "a \"b\"\n\t\\ ü \xF0\x9F\x98\x80";
  const std::string arguments = Json{{"input", input}}.dump();
  std::vector<engine::AnswerEvent> answer = {piece({{Kind::call_begin, 0, "patch"}})};
  for (const char c : arguments) answer.emplace_back(piece({{Kind::call_arguments, 0, std::string(1, c)}}));
  answer.emplace_back(piece({{Kind::call_end, 0, ""}}));
  answer.emplace_back(end_of(Finish::stop, 1));
  std::string stream = call.writer->begin();
  for (const auto& event : answer) stream += call.writer->event(event);
  for (const WireEvent& event : wire_events(stream)) {
    EXPECT_EQ(event.name.find("function_call_arguments"), std::string::npos);
    if (event.name == "response.custom_tool_call_input.done") {
      EXPECT_EQ(event.data()["input"], input);
    }
  }
  const Json item = call.writer->whole()["output"][0];
  EXPECT_EQ(item["type"], "custom_tool_call");
  EXPECT_EQ(item["input"], input);
  EXPECT_FALSE(item.contains("arguments"));
}

TEST_F(Responses, ACustomCallWithoutItsInputHandsOnWhatThereIs) {
  const Call call = call_of(R"({"input": "a", "tools": [{"type": "custom", "name": "patch"}]})");
  call.writer->event(piece({{Kind::call_begin, 0, "patch"},
                            {Kind::call_arguments, 0, R"({"text": "x"})"},
                            {Kind::call_end, 0, ""}}));
  call.writer->event(end_of(Finish::stop, 1));
  EXPECT_EQ(call.writer->whole()["output"][0]["input"], R"({"text": "x"})");
}

TEST_F(Responses, ANamespaceComesBackWithTheCall) {
  const Call call = call_of(
      R"({"input": "a", "tools": [{"type": "namespace", "name": "mcp__x__", "tools": [{"type": "function", "name": "f"}]}]})");
  const auto& tools = std::get<engine::ChatRequest>(call.request).tools;
  EXPECT_EQ(tools[0]["function"]["name"], "mcp__x__f");
  for (const auto& event : thinking_text_call("mcp__x__f")) call.writer->event(event);
  const Json item = call.writer->whole()["output"][2];
  EXPECT_EQ(item["name"], "f");
  EXPECT_EQ(item["namespace"], "mcp__x__");
}

TEST_F(Responses, ACutAnswerIsIncomplete) {
  const Call call = call_of(R"({"input": "a", "max_output_tokens": 1})");
  const auto events =
      wire_events(streamed(*call.writer, {piece({{Kind::reasoning, -1, "x"}}), end_of(Finish::length)}));
  EXPECT_EQ(events.back().name, "response.incomplete");
  const Json whole = call.writer->whole();
  EXPECT_EQ(whole["status"], "incomplete");
  EXPECT_EQ(whole["incomplete_details"], Json::parse(R"({"reason": "max_output_tokens"})"));
  EXPECT_EQ(whole["output"][0]["status"], "incomplete");
}

TEST_F(Responses, AFailureEndsTheStreamWithFailed) {
  const Call call = call_of(R"({"input": "a"})");
  std::string stream = call.writer->begin();
  stream += call.writer->failure({500, "server_error", "", "", "broken"});
  const auto events = wire_events(stream);
  EXPECT_EQ(events.back().name, "response.failed");
  EXPECT_EQ(events.back().data()["sequence_number"], 2);
  EXPECT_EQ(events.back().data()["response"]["status"], "failed");
  EXPECT_EQ(events.back().data()["response"]["error"],
            Json::parse(R"({"code": "server_error", "message": "broken"})"));
  EXPECT_EQ(store_.n_entries(), 0u);
}

// ---- Stored answers

TEST_F(Responses, AStoredAnswerIsGoneOnFrom) {
  const Call first = call_of(R"({"input": "a", "instructions": "first"})");
  for (const auto& event : thinking_text_call()) first.writer->event(event);
  const std::string id = first.writer->whole()["id"];
  EXPECT_EQ(store_.find(id)->response, first.writer->whole());
  const auto r = request_of(R"({"previous_response_id": ")" + id + R"(", "instructions": "second",
      "input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]})");
  ASSERT_EQ(r.messages.size(), 4u);
  EXPECT_EQ(r.messages[0], text::Message::of("system", "second"));
  EXPECT_EQ(r.messages[1], text::Message::of("user", "a"));
  EXPECT_EQ(r.messages[2].reasoning_content, "let me see");
  EXPECT_EQ(r.messages[2].tool_calls[0].name, "ls");
  EXPECT_EQ(r.messages[3], text::Message::of("tool", "x"));
}

TEST_F(Responses, NothingIsKeptUnlessItIsToBe) {
  const Call call = call_of(R"({"input": "a", "store": false})");
  for (const auto& event : thinking_text_call()) call.writer->event(event);
  EXPECT_EQ(store_.n_entries(), 0u);
  const ApiError error = refused(R"({"input": "a", "previous_response_id": "resp_x"})");
  EXPECT_EQ(error.status, 404);
  EXPECT_EQ(error.param, "previous_response_id");
}

TEST(ResponseStoreTest, TheOneUsedLongestAgoGoesFirst) {
  ResponseStore store(2);
  store.put("a", {1, {}});
  store.put("b", {2, {}});
  EXPECT_TRUE(store.find("a"));
  store.put("c", {3, {}});
  EXPECT_FALSE(store.find("b"));
  EXPECT_EQ(store.find("a")->response, 1);
  EXPECT_EQ(store.find("c")->response, 3);
  EXPECT_TRUE(store.erase("a"));
  EXPECT_FALSE(store.erase("a"));
  EXPECT_EQ(store.n_entries(), 1u);
}

TEST(ResponseStoreTest, BytesAreBounded) {
  ResponseStore store(100, 10000);
  for (int i = 0; i < 50; ++i) {
    store.put(std::to_string(i),
              {Json(std::string(2000, 'x')), {text::Message::of("user", std::string(500, 'y'))}});
    EXPECT_LE(store.n_bytes(), 10000u);
  }
  EXPECT_GE(store.n_entries(), 2u);
  EXPECT_TRUE(store.find("49"));
  store.put("big", {Json(std::string(20000, 'x')), {}});
  EXPECT_FALSE(store.find("big"));
  EXPECT_TRUE(store.find("49"));
}

// ---- The text of custom tools

std::string read_field(const std::string& json, size_t cut) {
  TextField field("input");
  std::string out;
  for (size_t i = 0; i < json.size(); i += cut) out += field.push(std::string_view(json).substr(i, cut));
  return field.has_begun() ? out : "-";
}

TEST(TextFieldTest, CutsDoNotMatter) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"({"input": "plain"})", "plain"},
      {R"( { "input" : "a\nb\"c\\d" , "more": "x"})", "a\nb\"c\\d"},
      {R"({"input":"\u00e4\ud83d\ude00\u000a"})", "ä\xF0\x9F\x98\x80\n"},
      {R"({"input":"\ud83d lone"})", "\xEF\xBF\xBD"},
      {R"({"input": ""})", ""},
      {R"({"other": "x", "input": "y"})", "-"},
      {R"({"input": 5})", "-"},
      {R"({"in put": "x"})", "-"},
      {R"({})", "-"},
  };
  for (const auto& [json, expected] : cases)
    for (size_t cut = 1; cut <= json.size(); ++cut) {
      const std::string text = read_field(json, cut);
      if (json.find("lone") == std::string::npos) EXPECT_EQ(text, expected) << json << " by " << cut;
      else EXPECT_TRUE(text.starts_with(expected)) << text;
    }
}

}  // namespace responses
}  // namespace
}  // namespace lily::server
