#include "engine/grammar/dfa.h"

#include <gtest/gtest.h>

#include <regex>
#include <string>
#include <vector>

#include "engine/grammar/number.h"
#include "engine/grammar/regex.h"
#include "tests/support/error_of.h"

namespace lily::engine::grammar {
namespace {

TEST(Dfa, WordsAcceptTheirWordsOnly) {
  const std::vector<std::string> list = {"a", "ab", "abc", "x\"y"};
  const Dfa dfa = words(list);
  for (const std::string& word : list) EXPECT_TRUE(dfa.matches(word)) << word;
  for (const char* other : {"", "b", "abcd", "x", "x\""}) EXPECT_FALSE(dfa.matches(other)) << other;
}

TEST(Dfa, CharactersAreCountedAsCodePoints) {
  const Dfa dfa = characters(2, 3);
  for (const char* good : {"ab", "abc", "é€", "😀😀😀"}) EXPECT_TRUE(dfa.matches(good)) << good;
  for (const char* bad : {"", "a", "abcd", "€", "😀😀😀😀", "\xff\xff", "a\xc3"})
    EXPECT_FALSE(dfa.matches(bad)) << bad;
  EXPECT_TRUE(characters(0, -1).matches(std::string(10'000, 'x')));
}

TEST(Dfa, TextsWithoutWordsAndOtherWords) {
  const std::vector<std::string> tags = {"</p>", "<p="};
  const Dfa without = texts_without(tags);
  for (const char* good : {"", "a", "<p", "</p", "<</p", "</q></", "é<"})
    EXPECT_TRUE(without.matches(good)) << good;
  for (const char* bad : {"</p>", "a<</p>b", "x<p=y", "<</<p="}) EXPECT_FALSE(without.matches(bad)) << bad;
  const Dfa others = all_but(tags);
  for (const char* good : {"", "</p", "</p>x", "<p", "y", "é"}) EXPECT_TRUE(others.matches(good)) << good;
  EXPECT_FALSE(others.matches("</p>"));
  EXPECT_FALSE(others.matches("<p="));
}

TEST(Dfa, EveryStateCanBeCompleted) {
  // Seven characters never match three letters, so that nothing of the pattern may be begun.
  EXPECT_TRUE(intersection(regex("^[a-z]{3}$"), characters(7, 7)).empty());
  const Dfa dfa = intersection(regex("^(ab|a{5})$"), characters(0, 3));
  EXPECT_TRUE(dfa.matches("ab"));
  EXPECT_LT(dfa.next(dfa.next(0, 'a'), 'a'), 0);
}

// The library of C++ knows the same ECMAScript syntax; texts and patterns are ASCII, where both agree.
TEST(Regex, AgreesWithTheStandardLibrary) {
  const char* const patterns[] = {
      "^a*$",          "a",         "^ab|cd$", "^(ab|cd)$", "^[a-c]+$",   "^[^a-c]+$", "^a{2,3}$",
      "^a{2,}b?$",     "^(a|b)*c$", "^\\d+$",  "^\\w+$",    "^\\s$",      "^.b$",      "^(?:ab)+$",
      "^a+?b$",        "^$",        "b$",      "^a",        "(^a|b$)",    "^[-a]+$",   "^[a\\]]+$",
      "^\\D\\W\\S$",   "^[\\d]b$",  "a.c",     "^a|b|^c$",  "^(a?b){2}$", "^\\.\\*$",  "^\\x61\\u0062$",
      "^(a{0,2}){2}$", "^a{0}b$"};
  std::vector<std::string> texts = {""};
  for (size_t i = 0; i < texts.size() && texts[i].size() < 4; ++i)
    for (const char c : std::string("abc1-]. ")) texts.push_back(texts[i] + c);
  ASSERT_GT(texts.size(), 4000u);
  for (const char* pattern : patterns) {
    const Dfa dfa = regex(pattern);
    const std::regex oracle(pattern);
    for (const std::string& text : texts)
      ASSERT_EQ(dfa.matches(text), std::regex_search(text, oracle)) << pattern << " on '" << text << "'";
  }
}

TEST(Regex, ReadsCharactersNotBytes) {
  EXPECT_TRUE(regex("^.{3}$").matches("é€😀"));
  EXPECT_FALSE(regex("^.$").matches("\n"));
  const Dfa greek = regex("^[α-ω]+$");
  EXPECT_TRUE(greek.matches("λογος"));
  EXPECT_FALSE(greek.matches("λογOς"));
  EXPECT_TRUE(regex("^[^a]$").matches("😀"));
  EXPECT_TRUE(regex("^\\ud83d\\ude00$").matches("😀"));
  EXPECT_FALSE(regex("^[^a]$").matches("\xed\xa0\x80"));
  EXPECT_TRUE(regex("^[\\u0000-\\uffff]*$").matches("aé€"));
}

TEST(Regex, NamesWhatItDoesNotSupport) {
  using test::error_of;
  const auto why = [](const char* pattern) { return error_of([&] { regex(pattern); }); };
  EXPECT_NE(why("a(?=b)").find("look-ahead"), std::string::npos);
  EXPECT_NE(why("(?<!b)a").find("look-behind"), std::string::npos);
  EXPECT_NE(why("(a)\\1").find("\\1"), std::string::npos);
  EXPECT_NE(why("\\p{L}").find("\\p"), std::string::npos);
  EXPECT_NE(why("\\bword").find("\\b"), std::string::npos);
  EXPECT_NE(why("(a").find("( without its )"), std::string::npos);
  EXPECT_NE(why("a)").find(") without its ("), std::string::npos);
  EXPECT_NE(why("[a").find("["), std::string::npos);
  EXPECT_NE(why("a{3,1}").find("wrong way"), std::string::npos);
  EXPECT_NE(why("a{100000}").find("1000"), std::string::npos);
  EXPECT_NE(why("((a{100}){100}){100}").find("states"), std::string::npos);
  EXPECT_NE(why("^(a|b)*a(a|b){20}$").find("states"), std::string::npos);
  EXPECT_NE(why(std::string(300, '(').c_str()).find("nesting"), std::string::npos);
  EXPECT_NE(why("\\").find("at the end"), std::string::npos);
}

NumberBounds::Bound bound(const char* text, bool exclusive = false) {
  return {*Decimal::parse(text), exclusive};
}

TEST(Numbers, WithinBoundsExactly) {
  struct Case {
    NumberBounds bounds;
    std::vector<const char*> good, bad;
  };
  const Case cases[] = {
      {{.integer = true, .low = {bound("-12")}, .high = {bound("105")}},
       {"-12", "-9", "0", "9", "10", "99", "100", "105", "-0"},
       {"-13", "106", "-100", "1000", "05", "1.0", "1e1", "+1", ""}},
      {{.low = {bound("0")}, .high = {bound("1")}},
       {"0", "0.5", "1", "1.0", "0.999999", "0.0", "-0"},
       {"1.01", "-0.1", "2", "1.00000001", "10"}},
      {{.low = {bound("0", true)}, .high = {bound("1.5", true)}},
       {"0.01", "1.4999", "1", "0.0001"},
       {"0", "0.0", "1.5", "1.50", "-0", "2", "-1"}},
      {{.low = {bound("-0.25")}, .high = {bound("-0.125")}},
       {"-0.25", "-0.2", "-0.125", "-0.1250"},
       {"-0.26", "-0.1", "0", "0.2", "-1", "-0.12499"}},
      {{.low = {bound("10")}}, {"10", "10.0", "11", "100", "99999"}, {"9.99", "9", "-10", "-100"}},
      {{.integer = true, .multiple_of = {*Decimal::parse("7")}},
       {"0", "7", "-14", "700", "-0"},
       {"1", "8", "-13", "70.0"}},
      {{.multiple_of = {*Decimal::parse("0.05")}},
       {"0.05", "1", "1.1", "1.10", "-3.15", "2.150"},
       {"0.01", "1.12", "0.051"}},
      {{.integer = true, .low = {bound("3")}, .high = {bound("4")}, .multiple_of = {*Decimal::parse("5")}},
       {},
       {"3", "4", "5", "0"}},
      {{.low = {bound("1e2")}, .high = {bound("1.5e2")}},
       {"100", "150", "120.5"},
       {"99", "151", "1000", "1e2"}},
  };
  for (const Case& c : cases) {
    const Dfa dfa = numbers(c.bounds);
    for (const char* text : c.good) EXPECT_TRUE(dfa.matches(text)) << text;
    for (const char* text : c.bad) EXPECT_FALSE(dfa.matches(text)) << text;
  }
}

TEST(Numbers, AgreeWithTheirDefinitionOnAllShortNumbers) {
  std::vector<std::string> texts;
  for (int whole = 0; whole <= 120; ++whole)
    for (const char* fraction : {"", ".0", ".5", ".25", ".05", ".99", ".500"})
      for (const char* sign : {"", "-"}) texts.push_back(sign + std::to_string(whole) + fraction);
  const char* const bounds[] = {"-100", "-10.5", "-1", "-0.05", "0",  "0.25",
                                "1",    "9.99",  "10", "99.5",  "110"};
  for (const char* low : bounds)
    for (const char* high : bounds)
      for (int variant = 0; variant < 8; ++variant) {
        NumberBounds b{.integer = (variant & 1) != 0,
                       .low = {bound(low, (variant & 2) != 0)},
                       .high = {bound(high, (variant & 2) == 0)}};
        if ((variant & 4) != 0) b.multiple_of.push_back(*Decimal::parse("0.25"));
        const Dfa dfa = numbers(b);
        for (const std::string& text : texts) {
          const bool good =
              b.contains(*Decimal::parse(text)) && (!b.integer || text.find('.') == std::string::npos);
          ASSERT_EQ(dfa.matches(text), good)
              << text << " in " << low << " .. " << high << ", variant " << variant;
        }
      }
}

TEST(Numbers, DecimalsAreReadExactly) {
  EXPECT_EQ(compare(*Decimal::parse("1e-5"), *Decimal::parse("0.00001")), 0);
  EXPECT_EQ(compare(*Decimal::parse("-0.0"), *Decimal::parse("0")), 0);
  EXPECT_LT(compare(*Decimal::parse("-2"), *Decimal::parse("-1.5")), 0);
  EXPECT_GT(compare(*Decimal::parse("100"), *Decimal::parse("99.9999")), 0);
  for (const char* bad : {"", "-", "x", "1e", "1e999999", "1.5x"}) EXPECT_FALSE(Decimal::parse(bad)) << bad;
}

TEST(Formats, TakeRealDatesOnly) {
  const Dfa date = *format_texts("date");
  for (const char* good : {"2024-02-29", "2000-02-29", "1999-12-31", "2023-04-30"})
    EXPECT_TRUE(date.matches(good)) << good;
  for (const char* bad :
       {"2023-02-29", "1900-02-29", "2023-04-31", "2023-13-01", "2023-00-10", "2023-1-1", "x2024-02-29"})
    EXPECT_FALSE(date.matches(bad)) << bad;
  EXPECT_TRUE(format_texts("date-time")->matches("2024-02-29T23:59:59.5+01:00"));
  EXPECT_TRUE(format_texts("ipv4")->matches("255.0.10.9"));
  EXPECT_FALSE(format_texts("ipv4")->matches("256.0.10.9"));
  EXPECT_FALSE(format_texts("ipv6").has_value());
}

}  // namespace
}  // namespace lily::engine::grammar
