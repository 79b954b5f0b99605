#include "model/json_strict.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/error_of.h"

namespace lily::model {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

std::string refusal_of(std::string_view text, size_t max_bytes = 1 << 20) {
  const std::string message = test::error_of([&] { parse_json_strict(text, "x.json", max_bytes); });
  EXPECT_THAT(message, StartsWith("x.json: "));
  return message;
}

TEST(JsonStrict, ReadsWhatTheLibraryReads) {
  for (const char* text : {"{}", "[]", "null", "1", "\"a\"",
                           R"({"a": [1, -2, 2.5, true, null, {"b": "\u00e9\ud83d\ude00"}], "c": {}})",
                           " [1 , [2,[3]], {\"x\":{\"y\":[]}}] \n"})
    EXPECT_EQ(parse_json_strict(text, "x.json", 1000), nlohmann::json::parse(text)) << text;
}

TEST(JsonStrict, KeysMayNotRepeatAtAnyLevel) {
  EXPECT_THAT(refusal_of(R"({"a": 1, "a": 1})"), HasSubstr("\"a\" appears twice"));
  EXPECT_THAT(refusal_of(R"({"x": [{"b": 1, "c": 2, "b": 3}]})"), HasSubstr("\"b\" appears twice"));
  EXPECT_THAT(refusal_of(R"({"a": 1, "\u0061": 1})"), HasSubstr("\"a\" appears twice"));  // spelt differently
  EXPECT_NO_THROW(parse_json_strict(R"({"a": {"a": {"a": 1}}, "b": [{"a": 1}, {"a": 2}]})", "x.json", 1000));
}

TEST(JsonStrict, DepthIsLimited) {
  const auto nested = [](int n) { return std::string(n, '[') + std::string(n, ']'); };
  EXPECT_NO_THROW(parse_json_strict(nested(8), "x.json", 1000));
  EXPECT_THAT(refusal_of(nested(9)), HasSubstr("deeper than 8"));
  EXPECT_THAT(refusal_of(std::string(500'000, '[')), HasSubstr("deeper than 8"));
  std::string objects;
  for (int i = 0; i < 50'000; ++i) objects += "{\"a\":";
  EXPECT_THAT(refusal_of(objects), HasSubstr("deeper than 8"));
}

TEST(JsonStrict, TextMustBeStrictUtf8) {
  for (const char* text : {"\"\xff\"", "\"\xc0\xaf\"", "\"\xed\xa0\x80\"", "\"\xf4\x90\x80\x80\"",
                           "\"\xe6\x9d\"", "\"\\ud800\"", "\"\\udc00\"", "\xff", "{\"\xfe\": 1}"})
    refusal_of(text);
}

TEST(JsonStrict, SyntaxErrorsAreOneLineAndSayWhere) {
  for (const char* text : {"", " ", "{", "[1,]", "{\"a\" 1}", "{a: 1}", "01", "1 2", "{} x", "\"a\nb\"",
                           "nul", "NaN", "Infinity", "// c\n1", "[1e999]", "'a'"})
    EXPECT_THAT(refusal_of(text), HasSubstr("not valid JSON")) << text;
}

TEST(JsonStrict, AZeroByteDoesNotEndTheText) {
  EXPECT_THAT(refusal_of(std::string_view("{}\0{", 4)), HasSubstr("byte 2 is zero"));
  EXPECT_THAT(refusal_of(std::string_view("{}\0", 3)), HasSubstr("zero"));
}

TEST(JsonStrict, SizeIsLimited) {
  EXPECT_NO_THROW(parse_json_strict("[10]", "x.json", 4));
  EXPECT_THAT(refusal_of("[100]", 4), HasSubstr("5 bytes, more than the 4"));
}

}  // namespace
}  // namespace lily::model
