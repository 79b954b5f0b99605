// The cases of the JSON Schema Test Suite for the keywords that are supported (tests/golden/json_schema).
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string>

#include "base/error.h"
#include "engine/grammar/call_grammar.h"
#include "engine/grammar/matcher.h"
#include "engine/grammar/schema_compiler.h"
#include "tests/support/error_of.h"
#include "text/json_text.h"

namespace lily::engine::grammar {
namespace {

// All orders of the members of all objects, since a grammar has its own; at most `limit` texts.
std::vector<std::string> spellings(const ordered_json& value, size_t limit = 5000) {
  std::vector<std::string> out;
  if (value.is_array()) {
    out = {"["};
    for (size_t i = 0; i < value.size(); ++i) {
      std::vector<std::string> longer;
      for (const std::string& item : spellings(value[i], limit))
        for (const std::string& begin : out)
          if (longer.size() < limit) longer.push_back(begin + (i > 0 ? ", " : "") + item);
      out = std::move(longer);
    }
    for (std::string& text : out) text += "]";
  } else if (value.is_object()) {
    std::vector<std::string> keys;
    for (const auto& [key, member] : value.items()) keys.push_back(key);
    std::sort(keys.begin(), keys.end());
    do {
      std::vector<std::string> begun = {"{"};
      for (size_t i = 0; i < keys.size(); ++i) {
        std::vector<std::string> longer;
        for (const std::string& member : spellings(value.at(keys[i]), limit))
          for (const std::string& begin : begun)
            longer.push_back(begin + (i > 0 ? ", " : "") + text::dump_json(keys[i]) + ": " + member);
        begun = std::move(longer);
      }
      for (const std::string& text : begun) out.push_back(text + "}");
    } while (out.size() < limit && std::next_permutation(keys.begin(), keys.end()));
  } else {
    out = {text::dump_json(value)};
  }
  return out;
}

// Shorter than its namesakes in the library.
ordered_json operator""_ojson(const char* text, size_t n) { return ordered_json::parse(text, text + n); }

bool accepts(Matcher& matcher, const std::string& text) {
  const Matcher::State end = matcher.next(matcher.start(), text);
  return end != Matcher::kDead && matcher.complete(end);
}

// Why a valid value is not written although it fits its schema; empty: there is no such reason.
std::string documented_gap(const ordered_json& group, const ordered_json& test) {
  const auto file = group["file"].get<std::string>();
  const auto name = test["description"].get<std::string>();
  if (file.starts_with("optional/format/")) return "a format stands for a part of its texts";
  if (name.starts_with("ignores ") || name.find("pseudo-array") != std::string::npos || file == "ref")
    return "without a type, other keywords say what is meant";
  if (name == "both anyOf valid (complex)" || name == "doesn't invalidate other properties" ||
      group["description"] == "additionalProperties are allowed by default")
    return "other members come only if additionalProperties says so";
  const bool respelled = file == "const" || file == "enum" || file == "type";
  if (respelled && test["data"].dump().find_first_of("0123456789") != std::string::npos)
    return "numbers are spelled as in the schema, integers without a point";
  return "";
}

TEST(SchemaSuite, NothingInvalidIsAcceptedAndLittleValidIsNot) {
  std::ifstream in("tests/golden/json_schema/suite.json");
  const ordered_json suite = ordered_json::parse(in);
  int n_accepted = 0, n_rejected = 0, n_gaps = 0, n_refused = 0;
  std::set<std::string> refused_for;
  for (const ordered_json& group : suite) {
    const std::string where =
        group["file"].get<std::string>() + ": " + group["description"].get<std::string>();
    ordered_json schema = group["schema"];
    if (group["file"].get<std::string>().starts_with("optional/format/")) schema["type"] = "string";
    Grammar grammar;
    try {
      grammar = schema_grammar(schema, "schema");
    } catch (const Error& e) {
      const std::string why = e.what();
      EXPECT_EQ(e.fault(), Fault::user) << where;
      EXPECT_TRUE(why.starts_with("schema at #")) << why;
      ++n_refused;
      if (why.find("no JSON value fits") != std::string::npos) {
        for (const ordered_json& test : group["tests"]) EXPECT_FALSE(test["valid"].get<bool>()) << where;
        refused_for.insert("no value fits");
        continue;
      }
      const std::string path = why.substr(10, why.find(": ") - 10);
      refused_for.insert(path.substr(path.rfind('/') + 1));
      continue;
    }
    Matcher matcher(grammar);
    for (const ordered_json& test : group["tests"]) {
      bool accepted = false;
      for (const std::string& text : spellings(test["data"])) accepted |= accepts(matcher, text);
      if (!test["valid"].get<bool>()) {
        EXPECT_FALSE(accepted) << where << ": " << test.dump();
        ++n_rejected;
      } else if (accepted) {
        ++n_accepted;
      } else {
        EXPECT_NE(documented_gap(group, test), "") << where << ": " << test.dump();
        ++n_gaps;
      }
    }
  }
  EXPECT_EQ(n_accepted, 273);
  EXPECT_EQ(n_rejected, 334);
  EXPECT_EQ(n_gaps, 76);
  EXPECT_EQ(n_refused, 71);
  const std::set<std::string> expected = {"#",
                                          "$ref",
                                          "contains",
                                          "dependentSchemas",
                                          "else",
                                          "if",
                                          "no value fits",
                                          "not",
                                          "oneOf",
                                          "patternProperties",
                                          "propertyNames",
                                          "then",
                                          "unevaluatedProperties",
                                          "uniqueItems"};
  EXPECT_EQ(refused_for, expected);
}

TEST(SchemaSuite, DocumentsOfCommonSchemasAreAcceptedWithAnyWhiteSpace) {
  std::ifstream in("tests/golden/json_schema/documents.jsonl");
  int n_valid = 0, n_invalid = 0;
  for (std::string line; std::getline(in, line);) {
    const ordered_json row = ordered_json::parse(line);
    Grammar grammar = schema_grammar(row["schema"], "schema");
    Matcher matcher(grammar);
    for (const ordered_json& document : row["valid"]) {
      EXPECT_TRUE(accepts(matcher, document.dump())) << document << " of " << row["schema"];
      EXPECT_TRUE(accepts(matcher, document.dump(2))) << document << " of " << row["schema"];
      EXPECT_TRUE(accepts(matcher, text::dump_json(document))) << document << " of " << row["schema"];
      ++n_valid;
    }
    for (const ordered_json& document : row["invalid"]) {
      for (const std::string& text : spellings(document, 200))
        EXPECT_FALSE(accepts(matcher, text)) << text << " of " << row["schema"];
      ++n_invalid;
    }
  }
  EXPECT_GT(n_valid, 400);
  EXPECT_GT(n_invalid, 400);
}

TEST(SchemaSuite, AnyJsonObject) {
  const Grammar grammar = json_object_grammar();
  Matcher matcher(grammar);
  std::ifstream in("tests/golden/text/json_dumps.jsonl");
  int n_accepted = 0;
  for (std::string line; std::getline(in, line);) {
    const auto row = ordered_json::parse(line);
    const auto& value = row["dumped"].get_ref<const std::string&>();
    if (value.find("Infinity") != std::string::npos || value.find("NaN") != std::string::npos) continue;
    if (accepts(matcher, "{\"value\": " + value + "}")) {
      ++n_accepted;
    } else {  // only numbers with more digits or larger exponents than are written
      const bool is_long =
          std::count_if(value.begin(), value.end(), [](char c) { return c >= '0' && c <= '9'; }) >= 20;
      const size_t exponent = value.find("e+");
      const bool is_large = exponent != std::string::npos && std::stoi(value.substr(exponent + 2)) > 279;
      EXPECT_TRUE(is_long || is_large) << value;
    }
  }
  EXPECT_GT(n_accepted, 300);
  for (const char* bad : {"[]",
                          "1",
                          "{",
                          "{}}",
                          "{\"a\"}",
                          "{\"a\":}",
                          "{a:1}",
                          "{\"a\":1,}",
                          "{\"a\":01}",
                          "{\"a\":.5}",
                          "{\"a\":\"\n\"}",
                          "{\"a\":\"\\x\"}",
                          "{\"a\":\"\\ud800\"}",
                          "{\"a\":\"\\ud800\\u0041\"}",
                          "{\"a\":\"\xff\"}",
                          "{\"a\":tru}",
                          "{\"a\":1}x",
                          "{\"a\":+1}",
                          "{\"a\":1.}",
                          "{'a':1}"})
    EXPECT_FALSE(accepts(matcher, bad)) << bad;
  for (const char* good :
       {"{}", "{ }", "{\"a\":{\"b\":[{},[],[[]]]}}", "{\"\\ud83d\\ude00\\n\":-0.5e+10}", "{\n  \"a\": 1\n}"})
    EXPECT_TRUE(accepts(matcher, good)) << good;
}

TEST(Matcher, BlanksAreBounded) {
  const Grammar grammar = json_object_grammar();
  Matcher matcher(grammar);
  EXPECT_TRUE(accepts(matcher, "{" + std::string(kMaxBlanks, ' ') + "}"));
  EXPECT_FALSE(accepts(matcher, "{" + std::string(kMaxBlanks + 1, ' ') + "}"));
  EXPECT_FALSE(accepts(matcher, "{\n\n}"));
  EXPECT_FALSE(accepts(matcher, "{} "));
}

// Any walk through the bytes that are allowed can be ended, and ends in JSON.
TEST(Matcher, EveryWalkEndsInADocument) {
  std::ifstream in("tests/golden/json_schema/documents.jsonl");
  std::mt19937 random(3);
  for (std::string line; std::getline(in, line);) {
    const ordered_json schema = ordered_json::parse(line)["schema"];
    const Grammar grammar = schema_grammar(schema, "schema");
    Matcher matcher(grammar);
    for (int round = 0; round < 50; ++round) {
      std::string text;
      Matcher::State state = matcher.start();
      for (int step = 0; step < 3000 && !(matcher.complete(state) && random() % 4 == 0); ++step) {
        std::vector<uint8_t> possible;
        for (int byte = 0; byte < 256; ++byte)
          if (matcher.next(state, static_cast<uint8_t>(byte)) != Matcher::kDead)
            possible.push_back(static_cast<uint8_t>(byte));
        if (possible.empty()) break;
        uint8_t byte = possible[random() % possible.size()];
        for (const char closer : {'"', '}', ']'})
          if (random() % 4 == 0 && std::find(possible.begin(), possible.end(), closer) != possible.end())
            byte = static_cast<uint8_t>(closer);
        text += static_cast<char>(byte);
        state = matcher.next(state, byte);
      }
      ASSERT_TRUE(matcher.complete(state)) << text;
      EXPECT_TRUE(ordered_json::accept(text)) << text << " of " << schema;
    }
  }
}

TEST(Matcher, ForgettingChangesNothing) {
  const Grammar grammar = json_object_grammar();
  Matcher matcher(grammar), other(grammar);
  const std::string text = R"({"a": [1, {"b": "x\n", "c": [true, null, -2.5e3]}], "d": {}})";
  Matcher::State state = matcher.start(), there = other.start();
  for (const char c : text) {
    state = matcher.next(state, static_cast<uint8_t>(c));
    there = other.next(there, static_cast<uint8_t>(c));
    Matcher::State* const kept[] = {&state};
    matcher.forget(kept);
    ASSERT_NE(state, Matcher::kDead);
    for (int byte = 0; byte < 256; ++byte)
      ASSERT_EQ(matcher.next(state, static_cast<uint8_t>(byte)) == Matcher::kDead,
                other.next(there, static_cast<uint8_t>(byte)) == Matcher::kDead);
    ASSERT_EQ(matcher.complete(state), other.complete(there));
  }
  EXPECT_TRUE(matcher.complete(state));
  EXPECT_LT(matcher.n_bytes(), size_t{2} << 20);
}

ordered_json deep(int depth, const char* open, const char* close, const char* core) {
  std::string text;
  for (int i = 0; i < depth; ++i) text += open;
  text += core;
  for (int i = 0; i < depth; ++i) text += close;
  return ordered_json::parse(text);
}

// Refused, each in well under a second.
TEST(SchemaLimits, HostileSchemasAreRefusedQuickly) {
  const auto why = [](const ordered_json& schema) {
    const auto begin = std::chrono::steady_clock::now();
    const std::string message = test::error_of([&] { schema_grammar(schema, "schema"); });
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10)) << message;
    return message;
  };
  const auto says = [](const std::string& message, const char* what) {
    EXPECT_NE(message.find(what), std::string::npos) << message;
  };
  says(why(deep(5000, R"({"items":)", "}", "{}")), "levels deep");
  says(why(deep(150, R"({"items":)", "}", "{}")), "levels deep");
  says(why(R"({"$ref":"#"})"_ojson), "refers to itself");
  says(why(R"({"anyOf":[{"$ref":"#"},{"type":"null"}]})"_ojson), "refers to itself");
  says(
      why(R"({"allOf":[{"$ref":"#/$defs/a"}],"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}})"_ojson),
      "refers to itself");
  // Each needs itself to be completed.
  says(why(R"({"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]})"_ojson), "no JSON value");
  ordered_json wide = {{"type", "object"}};
  for (int i = 0; i < 1001; ++i) wide["properties"]["p" + std::to_string(i)] = ordered_json::object();
  says(why(wide), "at most 1000");
  ordered_json product = {{"allOf", ordered_json::array()}};
  for (int i = 0; i < 20; ++i)
    product["allOf"].push_back(
        {{"anyOf", {{{"minLength", i}}, {{"maxLength", 100 + i}}, {{"minLength", 2 * i}}}}});
  says(why(product), "combinations");
  says(why({{"type", "string"}, {"pattern", "^(a|b)*a(a|b){18}$"}}), "states");
  says(why({{"type", "string"}, {"pattern", "^[a-z]*$"}, {"maxLength", 100'000}}), "states");
  ordered_json doubling = {{"$defs", {{"d0", {{"type", "null"}}}}}, {"$ref", "#/$defs/d40"}};
  for (int i = 1; i <= 40; ++i) {
    const std::string below = "#/$defs/d" + std::to_string(i - 1);
    doubling["$defs"]["d" + std::to_string(i)] = {{"anyOf", {{{"$ref", below}}, {{"$ref", below}}}}};
  }
  says(why(doubling), "combinations");
  ordered_json words = {{"enum", ordered_json::array()}};
  for (int i = 0; i < 30'000; ++i) words["enum"].push_back("word number " + std::to_string(i * 7919));
  says(why(words), "too large");
}

// A pattern of a few bytes, whose automaton stays below the number of states that is allowed, but whose
// states each stand for thousands of places in the pattern.
TEST(SchemaLimits, APatternThatTakesLongIsRefusedQuickly) {
  const ordered_json schema = {{"type", "string"}, {"pattern", "^((a{0,20}){0,20}){0,40}$"}};
  const auto begin = std::chrono::steady_clock::now();
  const std::string message = test::error_of([&] { schema_grammar(schema, "schema"); });
  EXPECT_NE(message.find("schema at #/pattern: "), std::string::npos) << message;
  EXPECT_NE(message.find("take too long"), std::string::npos) << message;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

TEST(SchemaLimits, PatternsOfOneSchemaShareALimit) {
  ordered_json schema = {{"type", "object"}};
  for (int i = 0; i < 20; ++i)
    schema["properties"]["p" + std::to_string(i)] = {{"type", "string"},
                                                     {"pattern", "^(a?){400}b{" + std::to_string(i) + "}$"}};
  const std::string message = test::error_of([&] { schema_grammar(schema, "schema"); });
  EXPECT_NE(message.find("take too long"), std::string::npos) << message;
  schema["properties"] = {{"one", schema["properties"]["p0"]}};
  EXPECT_NO_THROW(schema_grammar(schema, "schema"));
}

TEST(SchemaLimits, StrictFunctionsOfOneRequestShareTheirLimits) {
  ordered_json tools = ordered_json::array();
  for (int i = 0; i < 40; ++i)
    tools.push_back(
        {{"type", "function"},
         {"function",
          {{"name", "f" + std::to_string(i)},
           {"strict", true},
           {"parameters",
            {{"type", "object"},
             {"properties",
              {{"p", {{"type", "string"}, {"pattern", "^(a?){400}b{" + std::to_string(i) + "}$"}}}}}}}}}});
  const std::string message = test::error_of([&] { call_grammar(tools, ""); });
  EXPECT_NE(message.find("take too long"), std::string::npos) << message;
  EXPECT_NO_THROW(call_grammar(tools, "f3"));
}

TEST(SchemaLimits, RefusalsNameThePath) {
  const auto why = [](const ordered_json& schema) {
    return test::error_of([&] { schema_grammar(schema, "schema"); });
  };
  const std::pair<const char*, const char*> cases[] = {
      {R"({"properties":{"a/b":{"items":{"not":{}}}}})", "schema at #/properties/a~1b/items/not: "},
      {R"({"anyOf":[{},{"uniqueItems":true}]})", "#/anyOf/1/uniqueItems: "},
      {R"({"$ref":"#/$defs/x"})", "#/$ref: \"#/$defs/x\" does not exist"},
      {R"({"$ref":"other.json"})", "same schema"},
      {R"({"type":"text"})", "#/type: "},
      {R"({"type":[]})", "#/type: "},
      {R"({"requierd":["a"]})", "#/requierd: this keyword is not supported"},
      {R"({"required":"a"})", "#/required: "},
      {R"({"minLength":-1})", "#/minLength: "},
      {R"({"minLength":1.5})", "#/minLength: "},
      {R"({"maxItems":1e300})", "#/maxItems: "},
      {R"({"items":[{}]})", "prefixItems"},
      {R"({"properties":{"a":{"pattern":"(?=x)$"}
  }
})",
       "#/properties/a/pattern: "},
      {R"({"properties":{"a":{"format":"ipv6"}}})", "#/properties/a/format: "},
      {R"({"properties":{"a":3}})", "#/properties/a: "},
      {R"({"enum":[]})", "#/enum: "},
      {R"({"minimum":"3"})", "#/minimum: "},
      {R"({"minimum":3,"maximum":2})", "no JSON value"},
      {R"({"type":"string","enum":[1,2]})", "no JSON value"},
      {R"({"oneOf":[{"type":"integer"},{"type":"number"}]})", "#/oneOf: "},
      {R"({"multipleOf":0})", "multipleOf"},
      {R"([])", "must be an object"},
  };
  for (const auto& [schema, message] : cases)
    EXPECT_NE(why(ordered_json::parse(schema)).find(message), std::string::npos)
        << schema << " gave " << why(ordered_json::parse(schema));
}

TEST(SchemaLimits, ManyReadingsAtOnceStayBounded) {
  ordered_json schema = {{"anyOf", ordered_json::array()}};
  for (int i = 0; i < 300; ++i) schema["anyOf"].push_back({{"type", "string"}, {"minLength", i}});
  const Grammar grammar = schema_grammar(schema, "schema");
  Matcher matcher(grammar);
  EXPECT_TRUE(accepts(matcher, "\"abc\""));
  EXPECT_TRUE(accepts(matcher, '"' + std::string(500, 'x') + '"'));
}

}  // namespace
}  // namespace lily::engine::grammar
