// lily-tiny under constraints, through the assistant and the engine: what it says is checked, not only its
// form.
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/assistant.h"
#include "engine/grammar/grammar_compiler.h"
#include "engine/grammar/schema_compiler.h"
#include "tests/support/golden.h"

namespace lily::engine {
namespace {

using nlohmann::ordered_json;

struct Whole {
  text::ParsedOutput output;
  std::string raw;
  AnswerEnd end;
};

class ConstrainedAnswers : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    LoadOptions load;
    load.backend = "cpu";
    load.memory.context = 4096;
    assistant_ = std::make_unique<Assistant>(test::kTinyModel, load, EngineOptions{});
    assistant_->load();
  }
  static void TearDownTestSuite() { assistant_.reset(); }

  static ChatRequest ask(const std::string& text, bool thinking = false) {
    ChatRequest r;
    r.messages = {text::Message::of("user", text)};
    r.thinking.enabled = thinking;
    r.sampling.temperature = 0;
    r.max_tokens = 300;
    return r;
  }
  static Whole answer(const ChatRequest& request) {
    Whole whole;
    std::vector<int32_t> ids;
    AnswerStream stream = assistant_->start(request);
    while (!stream.done()) {
      auto event = stream.next_for(std::chrono::milliseconds(60'000));
      if (!event) break;
      if (auto* piece = std::get_if<AnswerPiece>(&*event)) {
        for (const auto& e : piece->events) whole.output.add(e);
        for (const auto& t : piece->tokens) ids.push_back(t.id);
      } else if (auto* end = std::get_if<AnswerEnd>(&*event)) {
        whole.end = std::move(*end);
      }
    }
    whole.raw = assistant_->tokenizer().decode_bytes(ids);
    EXPECT_EQ(whole.end.error, "");
    return whole;
  }
  static ordered_json weather_tools(bool strict) {
    return ordered_json::parse(R"([{"type": "function", "function": {"name": "get_weather",
      "description": "Get the weather of a city.", "parameters": {"type": "object",
      "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 3}}, "required": ["city", "days"]}}},
      {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}])")
        .patch(strict ? R"([{"op": "add", "path": "/0/function/strict", "value": true}])"_json
                      : R"([])"_json);
  }

  static std::unique_ptr<Assistant> assistant_;
};
std::unique_ptr<Assistant> ConstrainedAnswers::assistant_;

TEST_F(ConstrainedAnswers, EverySchemaHoldsForGreedyAndSampledText) {
  const char* const schemas[] = {
      R"({"type":"object","properties":{"name":{"type":"string","maxLength":30},"age":{"type":"integer","minimum":0,"maximum":130}},"required":["name","age"],"additionalProperties":false})",
      R"({"type":"array","items":{"enum":["red","green","blue"]},"minItems":2,"maxItems":4})",
      R"({"anyOf":[{"type":"string","pattern":"^[A-Z][a-z]{2,8}$"},{"type":"number","minimum":0,"maximum":1}]})",
      R"({"type":"object","properties":{"day":{"type":"string","format":"date"},"ok":{"type":"boolean"}},"required":["day","ok"]})"};
  for (const char* text : schemas) {
    const ordered_json schema = ordered_json::parse(text);
    const grammar::Grammar grammar = grammar::schema_grammar(schema, "schema");
    grammar::Matcher matcher(grammar);
    for (int round = 0; round < 6; ++round) {
      ChatRequest request = ask("Give me a JSON object with name Ada and age 36.", round % 2 == 1);
      request.format = {OutputFormat::Kind::json_schema, schema};
      if (round >= 2) {
        request.sampling.temperature = 1.5f;
        request.sampling.top_k = round >= 4 ? 0 : 20;
        request.sampling.top_p = 1;
        request.sampling.seed = static_cast<uint64_t>(round);
      }
      const Whole whole = answer(request);
      EXPECT_EQ(whole.end.finish, Finish::stop) << whole.raw;
      EXPECT_TRUE(ordered_json::accept(whole.output.content)) << whole.raw;
      const size_t begin = whole.output.content.find_first_not_of(' ');
      const auto state = matcher.next(matcher.start(), std::string_view(whole.output.content).substr(begin));
      ASSERT_NE(state, grammar::Matcher::kDead) << whole.raw;
      EXPECT_TRUE(matcher.complete(state)) << whole.raw;
    }
  }
}

// The model knows JSON answers: with the right schema it says what it would say anyway.
TEST_F(ConstrainedAnswers, ARightSchemaDoesNotChangeARightAnswer) {
  std::ifstream in(std::string(test::kTinyGoldens) + "/prompts.jsonl");
  int n = 0;
  for (std::string line; std::getline(in, line);) {
    const ordered_json golden = ordered_json::parse(line);
    if (golden["task"] != "json" || golden["correct"] != true) continue;
    ChatRequest request;
    request.messages = text::parse_messages(golden["messages"]);
    request.thinking.enabled = golden["enable_thinking"].get<bool>();
    request.sampling.temperature = 0;
    request.format.kind = OutputFormat::Kind::json_object;
    const Whole whole = answer(request);
    EXPECT_EQ(whole.output.content, golden["expected"].get<std::string>());
    ++n;
  }
  EXPECT_GT(n, 0);
}

TEST_F(ConstrainedAnswers, ToolChoicesHold) {
  for (const bool thinking : {false, true})
    for (const bool strict : {false, true}) {
      ChatRequest request = ask("Hello!", thinking);
      request.tools = weather_tools(strict);
      request.tool_choice.kind = ToolChoice::Kind::required;
      Whole whole = answer(request);
      EXPECT_GE(whole.output.calls.size(), 1u) << whole.raw;
      EXPECT_EQ(whole.end.finish, Finish::stop) << whole.raw;
      for (const auto& call : whole.output.calls) {
        EXPECT_TRUE(call.complete);
        EXPECT_TRUE(call.name == "get_weather" || call.name == "get_time") << call.name;
      }
      request.tool_choice = {.kind = ToolChoice::Kind::named, .name = "get_weather", .parallel = false};
      whole = answer(request);
      ASSERT_EQ(whole.output.calls.size(), 1u) << whole.raw;
      EXPECT_EQ(whole.output.calls[0].name, "get_weather");
      const ordered_json arguments = ordered_json::parse(whole.output.calls[0].arguments);
      EXPECT_TRUE(arguments.contains("city") && arguments.contains("days")) << arguments;
      if (strict) {
        ASSERT_TRUE(arguments["days"].is_number_integer()) << arguments;
        EXPECT_GE(arguments["days"].get<int>(), 1);
        EXPECT_LE(arguments["days"].get<int>(), 3);
      }
      request = ask("What is the weather in Rome?", thinking);
      request.tools = weather_tools(strict);
      request.tool_choice.kind = ToolChoice::Kind::none;
      whole = answer(request);
      EXPECT_EQ(whole.output.calls.size(), 0u);
      EXPECT_EQ(whole.raw.find("<tool_call>"), std::string::npos) << whole.raw;
      EXPECT_GT(whole.end.usage.completion_tokens, 1);
    }
}

// The goldens' own calls, with strict schemas: the same calls as without.
TEST_F(ConstrainedAnswers, StrictToolsLeaveRightCallsAlone) {
  std::ifstream in(std::string(test::kTinyGoldens) + "/prompts.jsonl");
  int n = 0;
  for (std::string line; std::getline(in, line) && n < 8;) {
    const ordered_json golden = ordered_json::parse(line);
    if (!golden["tools"].is_array() || golden["correct"] != true) continue;
    if (golden["output_text"].get<std::string>().find("<tool_call>") == std::string::npos) continue;
    ChatRequest request;
    request.messages = text::parse_messages(golden["messages"]);
    request.tools = golden["tools"];
    request.thinking.enabled = golden["enable_thinking"].get<bool>();
    request.sampling.temperature = 0;
    const Whole plain = answer(request);
    for (auto& tool : request.tools) tool["function"]["strict"] = true;
    // The prompt shows the tools, so `strict` is set where the prompt does not see it.
    GenerateRequest generate;
    ChatRequest shown = request;
    shown.tools = golden["tools"];
    const PreparedPrompt prompt = assistant_->prepare(shown);
    grammar::GrammarCompiler compiler(assistant_->tokenizer(), assistant_->config().stop_ids);
    generate.constraint =
        compiler.constraint_for(request, {.starts_in_thinking = prompt.starts_in_thinking, .n_room = 500});
    ASSERT_NE(generate.constraint, nullptr);
    generate.prompt = prompt.ids;
    generate.max_tokens = 500;
    generate.sampling.temperature = 0;
    generate.stop_ids = assistant_->config().stop_ids;
    Generation generation = assistant_->engine().generate(std::move(generate));
    std::vector<int32_t> ids;
    while (auto event = generation.next())
      if (auto* token = std::get_if<Token>(&*event)) ids.push_back(token->id);
    EXPECT_EQ(assistant_->tokenizer().decode_bytes(ids), plain.raw);
    ++n;
  }
  EXPECT_GE(n, 3);
}

TEST_F(ConstrainedAnswers, ThinkingEndsAtItsBudget) {
  ChatRequest request = ask("What is 17 plus 25?", true);
  const Whole free = answer(request);
  ASSERT_GT(free.end.reasoning_tokens, 3);
  EXPECT_EQ(free.end.detail, AnswerEnd::Detail::none);
  request.thinking.budget = 2;
  const Whole cut = answer(request);
  EXPECT_EQ(cut.end.detail, AnswerEnd::Detail::thinking_budget);
  EXPECT_NE(cut.output.reasoning.find("long enough"), std::string::npos) << cut.raw;
  EXPECT_FALSE(cut.output.content.empty()) << cut.raw;
  EXPECT_EQ(cut.output.content.find("<"), std::string::npos) << cut.raw;
  request.thinking.budget = 1000;
  const Whole ample = answer(request);
  EXPECT_EQ(ample.raw, free.raw);
  EXPECT_EQ(ample.end.detail, AnswerEnd::Detail::none);
}

// A bias towards a few tokens makes the model go round in circles.
TEST_F(ConstrainedAnswers, LoopsEndInThinkingAndInTheAnswer) {
  for (const bool thinking : {false, true}) {
    ChatRequest request = ask("Say something.", thinking);
    request.max_tokens = 400;
    const auto words = assistant_->tokenizer().encode(" again", text::AddedTokens::none);
    request.sampling.logit_bias = {{words[0], 100.0f}};
    const Whole whole = answer(request);
    EXPECT_EQ(whole.end.finish, Finish::stop) << whole.raw;
    EXPECT_EQ(whole.end.detail, AnswerEnd::Detail::loop);
    EXPECT_EQ(whole.output.reasoning.find("long enough") != std::string::npos, thinking) << whole.raw;
    EXPECT_LT(whole.end.usage.completion_tokens, 150) << whole.raw;
  }
}

}  // namespace
}  // namespace lily::engine
