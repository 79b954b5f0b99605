// JSON of requests: what is refused, and how it is told.
#include "server/body.h"

#include <gtest/gtest.h>

#include "tests/server/wire.h"
#include "text/json_text.h"

namespace lily::server {
namespace {

ApiError refused(const std::string& text) {
  return refusal_of([&] { parse_json(text); });
}

TEST(RequestJson, NumbersKeysAndDepthOfAnOrdinaryBodyAreKept) {
  const Json json = parse_json(R"({"b": 1, "a": [-2, 3.5, true, null, "x"], "c": {"d": {}}})");
  EXPECT_EQ(json.dump(), R"({"b":1,"a":[-2,3.5,true,null,"x"],"c":{"d":{}}})");
}

TEST(RequestJson, AnyDocumentCanBeRead) {
  EXPECT_EQ(parse_json("3"), 3);
  EXPECT_EQ(parse_json(" [] "), Json::array());
}

TEST(RequestJson, WhatIsNoJsonIsA400) {
  for (const char* text :
       {"", "{", "[1,]", "{\"a\":}", "nul", "{\"a\":NaN}", "{\"a\":Infinity}", "{} {}", "'a'",
        "{\"a\":1e999}", "\xff", "{\"a\":\"\xc3\x28\"}", "{\"a\":\"\xed\xa0\x80\"}"}) {
    const ApiError error = refused(text);
    EXPECT_EQ(error.status, 400) << text;
    EXPECT_EQ(error.type, "invalid_request_error");
    EXPECT_THAT(error.what(), testing::HasSubstr("not valid JSON")) << text;
  }
}

TEST(RequestJson, AZeroByteDoesNotEndTheText) {
  EXPECT_THAT(refused(std::string("{}\0{", 4)).what(), testing::HasSubstr("byte 2"));
}

TEST(RequestJson, AKeyThatComesTwiceIsRefusedWithItsPlace) {
  EXPECT_EQ(refused(R"({"a": 1, "a": 2})").param, "a");
  EXPECT_EQ(refused(R"({"messages": [{}, {"content": {"x": 1, "x": 1}}]})").param, "messages[1].content.x");
}

TEST(RequestJson, DepthIsLimited) {
  const auto nested = [](int depth) {
    return std::string(static_cast<size_t>(depth), '[') + std::string(static_cast<size_t>(depth), ']');
  };
  EXPECT_NO_THROW(parse_json(nested(kMaxRequestDepth)));
  EXPECT_THAT(refused(nested(kMaxRequestDepth + 1)).what(), testing::HasSubstr("levels"));
  EXPECT_EQ(refused(std::string(1000000, '[')).status, 400);
}

TEST(RequestJson, LargeIntegersKeepTheirDigitsForTheTemplate) {
  const Json json = parse_json(R"({"maximum": 340282366920938463463374607431768211455})");
  EXPECT_EQ(text::dump_json(json), R"({"maximum": 340282366920938463463374607431768211455})");
  EXPECT_EQ(to_text(plain_numbers(json)), R"({"maximum":3.402823669209385e+38})");
}

TEST(RequestJson, ManyKeysTakeLinearTime) {
  std::string text = "{";
  for (int i = 0; i < 200000; ++i) text += fmt::format("\"k{}\":0,", i);
  text.back() = '}';
  EXPECT_EQ(parse_json(text).size(), 200000u);
}

TEST(RequestBody, WrongTypesAndRangesNameTheField) {
  const Json json = parse_json(R"({"a": "x", "b": 7, "c": {"d": 1}, "e": 1.5, "f": 3.0, "g": [], "h": null,
                                   "big": 99999999999999999999})");
  Body body(json);
  EXPECT_EQ(refusal_of([&] { body.integer("a", 0, 9); }).param, "a");
  EXPECT_EQ(refusal_of([&] { body.integer("b", 0, 6); }).param, "b");
  EXPECT_EQ(refusal_of([&] { body.integer("e", 0, 9); }).param, "e");
  EXPECT_EQ(refusal_of([&] { body.integer("big", 0, 9); }).param, "big");
  EXPECT_EQ(refusal_of([&] { body.boolean("b", true); }).param, "b");
  EXPECT_EQ(refusal_of([&] { body.text("g"); }).param, "g");
  EXPECT_EQ(refusal_of([&] { body.array("a"); }).param, "a");
  EXPECT_EQ(refusal_of([&] { body.object("a"); }).param, "a");
  EXPECT_EQ(refusal_of([&] { body.object("c")->text("d"); }).param, "c.d");
  EXPECT_EQ(body.integer("f", 0, 9), 3);
  EXPECT_FALSE(body.integer("h", 0, 9).has_value());
  EXPECT_TRUE(body.boolean("absent", true));
}

TEST(RequestBody, FieldsThatNobodyAskedForAreKnown) {
  const Json json = parse_json(R"({"a": 1, "b": 2, "c\n": 3})");
  Body body(json);
  body.find("a");
  EXPECT_THAT(body.unknown(), testing::ElementsAre("b", "c\\x0a"));
}

TEST(RequestBody, OnlyAnObjectIsABody) {
  EXPECT_THAT(refusal_of([] { Body body(Json::array()); }).what(), testing::HasSubstr("object"));
}

}  // namespace
}  // namespace lily::server
