#include "text/json_text.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>

#include "tests/text/golden_lines.h"

namespace lily::text {
namespace {

TEST(JsonText, EqualsPython) {
  const auto golden = read_golden("tests/golden/text/json_dumps.jsonl");
  ASSERT_GT(golden.rows.size(), 400u);
  for (const auto& row : golden.rows) {
    const auto document = parse_json(row["json"].get<std::string>());
    ASSERT_TRUE(document) << row;
    EXPECT_EQ(dump_json(*document), row["dumped"].get<std::string>()) << row["json"];
  }
}

TEST(JsonText, NumbersThatAreNotFinite) {
  EXPECT_EQ(dump_json(std::nan("")), "NaN");
  EXPECT_EQ(dump_json(-std::numeric_limits<double>::infinity()), "-Infinity");
}

TEST(JsonText, OnlyWholeDocumentsAreRead) {
  for (const char* text :
       {"", " ", "{", "[1,", "{'a': 1}", "nul", "1 2", "{\"a\" 1}", "\"\xff\"", "01", "[1]]"})
    EXPECT_FALSE(parse_json(text)) << text;
}

TEST(JsonText, OneKeyManyTimes) {
  EXPECT_EQ(dump_json(*parse_json(R"({"a":1,"b":2,"a":{"c":3}})")), R"({"a": {"c": 3}, "b": 2})");
}

TEST(JsonText, ManyKeysAndDeepNestingAreLinear) {
  std::string keys = "{";
  for (int i = 0; i < 200'000; ++i) keys += fmt::format("\"k{}\":1,", i);
  keys.back() = '}';
  const auto begin = std::chrono::steady_clock::now();
  const auto document = parse_json(keys);
  ASSERT_TRUE(document);
  EXPECT_EQ(document->size(), 200'000u);
  const std::string nested = std::string(200'000, '[') + std::string(200'000, ']');
  EXPECT_EQ(dump_json(*parse_json(nested)), nested);
  EXPECT_TRUE(parse_json("[{\"a\": []}]", 3));
  EXPECT_FALSE(parse_json("[{\"a\": []}]", 2));
  EXPECT_TRUE(parse_json("1", 0));
  EXPECT_LT(std::chrono::steady_clock::now() - begin,
            std::chrono::seconds(20));  // minutes if it were quadratic
}

}  // namespace
}  // namespace lily::text
