#include "text/stop_strings.h"

#include <gtest/gtest.h>

#include <random>

namespace lily::text {
namespace {

std::string pushed(StopStrings& stop, std::string_view text) {
  std::string out;
  stop.push(text, out);
  return out;
}

TEST(StopStrings, AStringOverSeveralTokens) {
  StopStrings stop({"own fox"});
  EXPECT_EQ(pushed(stop, "The quick br"), "The quick br");
  EXPECT_EQ(pushed(stop, "own"), "");
  EXPECT_EQ(pushed(stop, " fox"), "");
  EXPECT_EQ(stop.matched(), 0);
  std::string rest;
  stop.flush(rest);
  EXPECT_EQ(rest, "");
}

TEST(StopStrings, TextThatOnlyBeginsLikeItIsReleased) {
  StopStrings stop({"own fox"});
  EXPECT_EQ(pushed(stop, "own"), "");
  EXPECT_EQ(pushed(stop, " f"), "");
  EXPECT_EQ(pushed(stop, "lour"), "own flour");
  EXPECT_EQ(pushed(stop, " o"), " ");
  std::string rest;
  stop.flush(rest);
  EXPECT_EQ(rest, "o");
  EXPECT_EQ(stop.matched(), -1);
}

TEST(StopStrings, NothingComesAfterTheMatch) {
  StopStrings stop({"five"});
  EXPECT_EQ(pushed(stop, "four five six"), "four ");
  EXPECT_EQ(pushed(stop, "seven"), "");
  std::string rest;
  stop.flush(rest);
  EXPECT_EQ(rest, "");
}

TEST(StopStrings, FirstToEndWinsThenTheLongest) {
  StopStrings stop({"abcd", "bc", "xbc"});
  EXPECT_EQ(pushed(stop, "zabcd"), "za");
  EXPECT_EQ(stop.matched(), 1);
  StopStrings both({"bc", "xbc"});
  EXPECT_EQ(pushed(both, "zxbc"), "z");
  EXPECT_EQ(both.matched(), 1);
}

TEST(StopStrings, EmptyStringsNeverMatch) {
  StopStrings stop({"", "b"});
  EXPECT_EQ(pushed(stop, "aab"), "aa");
  EXPECT_EQ(stop.matched(), 1);
  StopStrings none({""});
  EXPECT_EQ(pushed(none, "aab"), "aab");
}

TEST(StopStrings, EqualsASearchOfTheWholeText) {
  std::mt19937 random(7);
  for (int round = 0; round < 3000; ++round) {
    const auto word = [&](size_t longest) {
      std::string out(1 + random() % longest, 'a');
      for (char& c : out) c = "ab"[random() % 2];
      return out;
    };
    std::vector<std::string> strings;
    for (size_t n = 1 + random() % 3; n > 0; --n) strings.push_back(word(5));
    const std::string text = word(40);
    size_t end = std::string::npos, begin = text.size();  // of the match that ends first, longest on ties
    for (const auto& s : strings)
      if (const size_t at = text.find(s);
          at != std::string::npos && (at + s.size() < end || (at + s.size() == end && at < begin)))
        begin = at, end = at + s.size();
    StopStrings stop(strings);
    std::string out;
    for (size_t pos = 0; pos < text.size();) {
      const size_t n = 1 + random() % 4;
      stop.push(std::string_view(text).substr(pos, n), out);
      EXPECT_LE(out.size(), begin) << "seed 7, round " << round;
      pos += n;
    }
    stop.flush(out);
    EXPECT_EQ(out, text.substr(0, begin)) << "seed 7, round " << round;
    EXPECT_EQ(stop.matched() >= 0, end != std::string::npos);
  }
}

}  // namespace
}  // namespace lily::text
