// Constraints on what lily-tiny's tokenizer writes, without a model: texts are read token by token.
#include "engine/grammar/chat_constraint.h"

#include <gtest/gtest.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/grammar/grammar_compiler.h"
#include "tests/support/error_of.h"
#include "tests/support/golden.h"
#include "tests/text/tiny_tokenizer.h"
#include "text/output_reader.h"

namespace lily::engine::grammar {
namespace {

using nlohmann::ordered_json;

using text::tiny;
int32_t id(const char* token) { return tiny().id_of(token).value(); }

constexpr const char* kTools = R"([
  {"type": "function", "function": {"name": "get_weather", "strict": false, "parameters": {"type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}},
  {"type": "function", "function": {"name": "book", "strict": true, "parameters": {"type": "object",
    "properties": {"seats": {"type": "integer", "minimum": 1, "maximum": 9}, "class": {"type": "string", "enum": ["first", "second"]},
      "notes": {"type": "string"}, "stops": {"type": "array", "items": {"type": "string"}}, "until": {"type": ["string", "null"]}},
    "required": ["seats", "class"], "additionalProperties": false}}},
  {"type": "function", "function": {"name": "ping"}}])";

class Constraints : public testing::Test {
 protected:
  Constraints() : compiler_(tiny(), {id("<|im_end|>"), id("<|endoftext|>")}) {
    request_.tools = ordered_json::parse(kTools);
  }

  std::unique_ptr<TokenConstraint> make(bool thinking = false, int32_t n_room = 100'000) {
    return compiler_.constraint_for(request_, {.starts_in_thinking = thinking, .n_room = n_room});
  }

  // How many tokens of the text pass; all: -1. Masks and single answers must agree at every step.
  int refused_at(TokenConstraint& constraint, const std::string& text) {
    const std::vector<int32_t> ids = tiny().encode(text, text::AddedTokens::all);
    for (size_t i = 0; i < ids.size(); ++i) {
      if (!may_come(constraint, ids[i])) return static_cast<int>(i);
      constraint.accept(ids[i]);
    }
    return -1;
  }
  bool passes(TokenConstraint& constraint, const std::string& text) {
    return refused_at(constraint, text) < 0;
  }

  bool may_come(TokenConstraint& constraint, int32_t token) {
    TokenMask mask(tiny().n_tokens());
    const bool masked = constraint.allowed(mask);
    EXPECT_EQ(masked, !constraint.is_free());
    if (!masked) return true;
    for (int32_t other = 0; other < tiny().n_tokens(); other += (other == token ? 1 : 7))
      EXPECT_EQ(mask.allows(other), constraint.allows(other)) << other;
    EXPECT_EQ(mask.allows(token), constraint.allows(token)) << token;
    return mask.allows(token);
  }
  // The tokens that are forced now, as text; at most n.
  std::string forced(TokenConstraint& constraint, int n = 100) {
    std::vector<int32_t> ids;
    while (n-- > 0) {
      TokenMask mask(tiny().n_tokens());
      if (!constraint.allowed(mask)) break;
      int32_t only = -1, n_allowed = 0;
      for (int32_t t = 0; t < tiny().n_tokens(); ++t)
        if (mask.allows(t)) only = t, ++n_allowed;
      if (n_allowed != 1) break;
      ids.push_back(only);
      constraint.accept(only);
      if (only == id("<|im_end|>")) break;
    }
    return tiny().decode_bytes(ids);
  }

  GrammarCompiler compiler_;
  ChatRequest request_;
};

TEST_F(Constraints, NothingIsHeldWhereNothingIsAsked) {
  request_.tools = nullptr;
  GrammarCompiler without_guard(tiny(), {id("<|im_end|>")}, {.loops = {.enabled = false}});
  EXPECT_EQ(without_guard.constraint_for(request_, {.n_room = 100}), nullptr);
  const auto guard = make(true);
  ASSERT_NE(guard, nullptr);
  EXPECT_TRUE(guard->is_free());
  EXPECT_TRUE(passes(*guard, "anything</think>\n\nand <tool_call> more<|im_end|>"));
}

TEST_F(Constraints, JsonComesAfterTheThinkingAndEndsTheAnswer) {
  request_.tools = nullptr;
  request_.format.kind = OutputFormat::Kind::json_object;
  const auto c = make(true);
  EXPECT_TRUE(passes(*c, "I think {so} \"freely"));
  EXPECT_FALSE(may_come(*c, id("<|im_end|>")));
  EXPECT_TRUE(passes(*c, "</think>\n\n"));
  EXPECT_FALSE(passes(*c, "Sure"));
  EXPECT_FALSE(may_come(*c, id("<|im_end|>")));
  EXPECT_TRUE(passes(*c, "{\"a\": [1, \"<tool\"]"));
  EXPECT_FALSE(may_come(*c, id("<tool_call>")));
  EXPECT_FALSE(may_come(*c, id("<|im_end|>")));
  EXPECT_TRUE(passes(*c, "}"));
  EXPECT_FALSE(passes(*c, " "));
  EXPECT_TRUE(passes(*c, "<|im_end|>"));
  EXPECT_EQ(c->detail(), StopDetail::none);
}

TEST_F(Constraints, SchemasHoldWithAndWithoutThinking) {
  request_.tools = nullptr;
  request_.format = {
      OutputFormat::Kind::json_schema,
      ordered_json::parse(
          R"({"type":"object","properties":{"n":{"type":"integer","maximum":20}},"required":["n"]})")};
  for (const bool thinking : {false, true}) {
    const auto c = make(thinking);
    if (thinking) EXPECT_TRUE(passes(*c, "hm</think>"));
    EXPECT_TRUE(passes(*c, "\n\n{\"n\": 1"));
    EXPECT_FALSE(passes(*c, "99"));
    EXPECT_EQ(c->detail(), StopDetail::none);
  }
  request_.format.schema = ordered_json::parse(R"({"not": {}})");
  EXPECT_NE(test::error_of([&] { make(); }).find("#/not"), std::string::npos);
}

TEST_F(Constraints, ToolChoiceNoneMakesCallsImpossible) {
  request_.tool_choice.kind = ToolChoice::Kind::none;
  const auto c = make(true);
  EXPECT_FALSE(may_come(*c, id("<tool_call>")));
  EXPECT_TRUE(passes(*c, "let me think</think>\n\nThe tag <function=x> in a line is fine, a < b too.\n"));
  EXPECT_FALSE(may_come(*c, id("<tool_call>")));
  EXPECT_FALSE(passes(*c, "<function=get_weather>"));
  EXPECT_TRUE(passes(*c, " <function= after a blank\n<functional>\n<b><|im_end|>"));
}

TEST_F(Constraints, ARequiredCallIsForced) {
  request_.tool_choice.kind = ToolChoice::Kind::required;
  const auto c = make(true);
  EXPECT_TRUE(passes(*c, "some thinking"));
  EXPECT_FALSE(may_come(*c, id("<|im_end|>")));
  EXPECT_TRUE(passes(*c, "</think>\n\n"));
  EXPECT_FALSE(passes(*c, "Hello"));
  EXPECT_FALSE(may_come(*c, id("<|im_end|>")));
  EXPECT_TRUE(passes(*c, "<tool_call>"));
  EXPECT_FALSE(passes(*c, "\n<function=odd>"));
}

TEST_F(Constraints, CallsHaveDeclaredNamesAndRequiredParameters) {
  request_.tool_choice.kind = ToolChoice::Kind::required;
  const std::string open = "<tool_call>\n<function=get_weather>\n";
  const std::string city = "<parameter=city>\nRome, \"<b>\" {\n\nx}\n</parameter>\n";
  const std::string days = "<parameter=days>\n3\n</parameter>\n";
  for (const std::string& good :
       {open + city + "</function>\n</tool_call><|im_end|>", open + days + city + "</function>\n</tool_call>",
        open + city + days + "</function>\n</tool_call>\n" + open + city +
            "</function>\n</tool_call><|im_end|>",
        std::string(
            "<tool_call>\n<function=ping>\n<parameter=any>\nx\n</parameter>\n</function>\n</tool_call>")}) {
    const auto c = make();
    EXPECT_TRUE(passes(*c, good)) << good;
  }
  for (const std::string& bad :
       {open + "</function>\n</tool_call>", open + days + "</function>", open + city + city,
        open + "<parameter=zip>", open + city + "</tool_call>", open + city + "<|im_end|>",
        std::string("<tool_call>{\"name\": \"ping\"}"), std::string("<tool_call>\n<function=get>"),
        open + "<parameter=city>\nx<parameter=days>", open + city + "</function>\n</tool_call>text"}) {
    const auto c = make();
    EXPECT_FALSE(passes(*c, bad)) << bad;
  }
}

TEST_F(Constraints, ANamedFunctionIsTheOnlyOne) {
  request_.tool_choice = {.kind = ToolChoice::Kind::named, .name = "ping", .parallel = false};
  const auto c = make();
  EXPECT_FALSE(passes(*c, "text"));
  EXPECT_TRUE(passes(*c, "<tool_call>"));
  EXPECT_EQ(forced(*c, 3).substr(0, 1), "\n");
  const auto d = make();
  EXPECT_FALSE(passes(*d, "<tool_call>\n<function=get_weather>"));
  const auto e = make();
  EXPECT_TRUE(passes(*e, "<tool_call>\n<function=ping>\n</function>\n</tool_call>"));
  EXPECT_EQ(forced(*e), "<|im_end|>") << "parallel calls are off";
  request_.tool_choice.name = "absent";
  EXPECT_NE(test::error_of([&] { make(); }).find("absent"), std::string::npos);
  request_.tools = nullptr;
  EXPECT_NE(test::error_of([&] { make(); }).find("no tools"), std::string::npos);
}

// Whatever a strict call lets through is what the parser of answers makes typed arguments of.
TEST_F(Constraints, StrictFunctionsHoldTheirSchemas) {
  const std::string open = "<tool_call>\n<function=book>\n";
  const auto parameter = [](const std::string& name, const std::string& value) {
    return "<parameter=" + name + ">\n" + value + "\n</parameter>\n";
  };
  const std::string close = "</function>\n</tool_call>";
  const std::string seats = parameter("seats", "3"), first = parameter("class", "first");
  const std::pair<std::string, const char*> good[] = {
      {seats + first, R"({"seats": 3, "class": "first"})"},
      {first + seats + parameter("notes", "two\nlines \"quoted\""),
       R"({"class": "first", "seats": 3, "notes": "two\nlines \"quoted\""})"},
      {seats + parameter("stops", "[\"a\", \"b\"]") + first,
       R"({"seats": 3, "stops": ["a", "b"], "class": "first"})"},
      {seats + first + parameter("until", "null"), R"({"seats": 3, "class": "first", "until": null})"},
      {seats + first + parameter("until", "noon"), R"({"seats": 3, "class": "first", "until": "noon"})"}};
  for (const auto& [body, arguments] : good) {
    const auto c = make();
    const std::string answer = "Well.\n\n" + open + body + close;
    EXPECT_EQ(refused_at(*c, answer), -1) << body;
    const text::ToolSet tools(request_.tools);
    text::OutputReader reader(tiny(), tools, {});
    std::vector<text::OutputEvent> events;
    for (const int32_t token : tiny().encode(answer, text::AddedTokens::all)) reader.push(token, events);
    reader.finish(text::OutputEnd::stop, events);
    text::ParsedOutput parsed;
    for (const auto& event : events) parsed.add(event);
    ASSERT_EQ(parsed.calls.size(), 1u);
    EXPECT_EQ(ordered_json::parse(parsed.calls[0].arguments), ordered_json::parse(arguments));
  }
  for (const std::string& bad :
       {parameter("seats", "12"), parameter("seats", "three"), parameter("class", "third"),
        parameter("class", "\"first\""), parameter("stops", "a, b"), parameter("odd", "1"), first + close}) {
    const auto c = make();
    EXPECT_FALSE(passes(*c, open + bad)) << bad;
  }
  const auto c = make();
  EXPECT_FALSE(passes(*c, "Well.\n<function=book>")) << "a bare call would escape the schema";
}

TEST_F(Constraints, StrictSchemasThatCannotBeHeldAreRefused) {
  const auto why = [&](const char* schema) {
    request_.tools[1]["function"]["parameters"] = ordered_json::parse(schema);
    return test::error_of([&] { make(); });
  };
  EXPECT_NE(why(R"({"type":"object","properties":{"a":{"not":{}}}})")
                .find("tools[1].function.parameters at #/properties/a/not"),
            std::string::npos);
  EXPECT_NE(
      why(R"({"type":"object","properties":{"a":{"anyOf":[{"type":"string"},{"type":"integer","minimum":5}]}}})")
          .find("#/properties/a"),
      std::string::npos);
  EXPECT_NE(why(R"({"anyOf":[{"type":"object"},{"type":"object"}]})").find("one object schema"),
            std::string::npos);
}

TEST_F(Constraints, ARefusedSchemaNamesItsField) {
  const auto field = [&] {
    try {
      make();
    } catch (const SchemaRefused& e) {
      return e.field;
    }
    return std::string("not refused");
  };
  const auto bad = ordered_json::parse(R"({"type":"object","properties":{"a":{"not":{}}}})");
  request_.tools[1]["function"]["parameters"] = bad;
  EXPECT_EQ(field(), "tools[1].function.parameters");
  request_.tools = nullptr;
  request_.format = {.kind = OutputFormat::Kind::json_schema, .schema = bad, .field = "text.format"};
  EXPECT_EQ(field(), "text.format");
}

TEST_F(Constraints, AnAnswerMayBeJsonOrACall) {
  request_.format.kind = OutputFormat::Kind::json_object;
  EXPECT_TRUE(passes(*make(), "{\"a\": 1}<|im_end|>"));
  EXPECT_TRUE(passes(*make(), "<tool_call>\n<function=ping>\n</function>\n</tool_call><|im_end|>"));
  EXPECT_FALSE(passes(*make(), "{\"a\": <tool_call>"));
  EXPECT_TRUE(passes(*make(true), "hm <tool_call>\n<function=ping>\n</function>\n</tool_call><|im_end|>"));
}

TEST_F(Constraints, ThinkingIsClosedAtItsBudgetBetweenCharacters) {
  request_.tools = nullptr;
  request_.thinking.budget = 4;
  const auto c = make(true);
  const std::vector<int32_t> words = tiny().encode("the man said that he was", text::AddedTokens::none);
  ASSERT_GE(words.size(), 4u);
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(c->is_free());
    c->accept(words[static_cast<size_t>(i)]);
  }
  EXPECT_EQ(forced(*c), std::string(kClosingSentence) + "</think>\n\n");
  EXPECT_TRUE(c->is_free());
  EXPECT_EQ(c->detail(), StopDetail::thinking_budget);

  // A character that is half written is finished first.
  const std::vector<int32_t> bytes = tiny().encode("\xf0\x9f\x9a", text::AddedTokens::none);
  const auto d = make(true);
  for (int i = 0; i < 3; ++i) d->accept(words[0]);
  d->accept(bytes[0]);
  EXPECT_TRUE(d->is_free());

  // Nothing happens if it ends by itself.
  const auto e = make(true);
  EXPECT_TRUE(passes(*e, "ok</think>\n\nthe man said that he was going to the house"));
  EXPECT_TRUE(e->is_free());
  EXPECT_EQ(e->detail(), StopDetail::none);

  request_.thinking.budget = 0;
  EXPECT_EQ(forced(*make(true)), std::string(kClosingSentence) + "</think>\n\n");
}

TEST_F(Constraints, TheAnswerKeepsItsRoom) {
  request_.thinking.budget = 1'000'000;
  const int32_t n_closing = static_cast<int32_t>(compiler_.vocabulary().closing().size());
  const auto n_free = [&](int32_t n_room) {
    const auto c = make(true, n_room);
    const auto tokens =
        tiny().encode("the man said that he was going to the house of the king", text::AddedTokens::none);
    int32_t n = 0;
    uint32_t random = 1;
    for (; c->is_free() && n < 10'000; ++n) {
      random = random * 1664525 + 1013904223;  // no cycle for the guard to find
      c->accept(tokens[(random >> 16) % tokens.size()]);
    }
    return n;
  };
  EXPECT_EQ(n_free(5000), 5000 - 1024 - n_closing);
  EXPECT_EQ(n_free(1000), 500 - n_closing);
  EXPECT_EQ(n_free(10), 0);
}

TEST_F(Constraints, LoopsAreEnded) {
  request_.tools = nullptr;
  const std::string cycle = " the man said that he was";
  const auto ids = tiny().encode(cycle, text::AddedTokens::none);
  ASSERT_GE(ids.size(), 4u);
  const auto rounds_until_held = [&](TokenConstraint& c) {
    int n = 0;
    for (; n < 20 && c.is_free(); ++n)
      for (const int32_t token : ids) c.accept(token);
    return n;
  };
  const auto thinking = make(true);
  EXPECT_EQ(rounds_until_held(*thinking), 8);
  EXPECT_EQ(forced(*thinking), std::string(kClosingSentence) + "</think>\n\n");
  EXPECT_EQ(thinking->detail(), StopDetail::loop);
  const auto answer = make(false);
  EXPECT_EQ(rounds_until_held(*answer), 8);
  EXPECT_EQ(forced(*answer), "<|im_end|>");
  EXPECT_EQ(answer->detail(), StopDetail::loop);
}

TEST(LoopGuard, FindsExactCyclesAndNothingElse) {
  const auto steps_until = [](int period, int repeats, bool broken) {
    LoopGuard guard({});
    for (int i = 0; i < 50; ++i) guard.push(1000 + i);
    for (int i = 0; i < period * repeats; ++i) {
      const int32_t token = broken && i % (3 * period) == 0 ? 5000 + i : i % period;
      if (guard.push(token)) return i + 1;
    }
    return -1;
  };
  for (const int period : {4, 5, 17, 63, 64}) {
    EXPECT_EQ(steps_until(period, 8, false), 8 * period) << period;
    EXPECT_EQ(steps_until(period, 30, true), -1) << period;
  }
  EXPECT_EQ(steps_until(65, 20, false), -1);
  EXPECT_EQ(steps_until(1, 100, false), 32) << "one token is a cycle of four";
  EXPECT_EQ(steps_until(3, 100, false), 48) << "three tokens are a cycle of six";
  EXPECT_NE(test::error_of([] { LoopGuard bad({.min_period = 5, .max_period = 4}); }).find("loop guard"),
            std::string::npos);
}

}  // namespace
}  // namespace lily::engine::grammar
