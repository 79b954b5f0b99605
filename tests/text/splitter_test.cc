#include "text/splitter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/text/golden_lines.h"

namespace lily::text {
namespace {

using testing::ElementsAre;

std::vector<std::string> pieces(std::string_view text) {
  std::vector<std::string> out;
  for (size_t pos = 0; pos < text.size();) {
    const size_t size = piece_size(text, pos);
    out.emplace_back(text.substr(pos, size));
    pos += size;
  }
  return out;
}

TEST(Splitter, EqualsTheOriginalRegexEngine) {
  const auto golden = read_golden("tests/golden/text/splits.jsonl");
  ASSERT_EQ(golden.rows.size(), 600u);
  for (const auto& row : golden.rows)
    EXPECT_EQ(pieces(row["text"].get<std::string>()), row["pieces"].get<std::vector<std::string>>())
        << row["text"];
}

TEST(Splitter, MarksBelongToTheLetterRun) {
  EXPECT_THAT(pieces("cafe\u0301s ok"), ElementsAre("cafe\u0301s", " ok"));
  EXPECT_THAT(pieces("नमस्ते दुनिया"), ElementsAre("नमस्ते", " दुनिया"));
  EXPECT_THAT(pieces("x\u0301 \u0301y"), ElementsAre("x\u0301", " \u0301y"));
  EXPECT_THAT(pieces("\u0301!I"), ElementsAre("\u0301", "!I"));
}

TEST(Splitter, DigitsStandAlone) {
  EXPECT_THAT(pieces("2026-04-17 v12"),
              ElementsAre("2", "0", "2", "6", "-", "0", "4", "-", "1", "7", " v", "1", "2"));
}

TEST(Splitter, WhiteSpaceAroundLineEnds) {
  EXPECT_THAT(pieces("a  \n\n  b"), ElementsAre("a", "  \n\n", " ", " b"));
  EXPECT_THAT(pieces("x\t\ty \r\n z   "), ElementsAre("x", "\t", "\ty", " \r\n", " z", "   "));
}

TEST(Splitter, SymbolsSwallowLineEnds) {
  EXPECT_THAT(pieces(" !!??\n\nx=y;"), ElementsAre(" !!??\n\n", "x", "=y", ";"));
}

// The texts whose ids are published for the full vocabulary, at the level of pieces.
TEST(Splitter, PublishedTexts) {
  EXPECT_THAT(pieces("Hello, world!"), ElementsAre("Hello", ",", " world", "!"));
  EXPECT_THAT(pieces("中文测试：こんにちは。"), ElementsAre("中文测试", "：こんにちは", "。"));
  EXPECT_THAT(pieces("I'm 1234, we're coding."),
              ElementsAre("I", "'m", " ", "1", "2", "3", "4", ",", " we", "'re", " coding", "."));
  EXPECT_THAT(pieces("  one\nTwo... 42!\t"),
              ElementsAre(" ", " one", "\n", "Two", "...", " ", "4", "2", "!", "\t"));
  EXPECT_THAT(pieces("雪 😀 café"), ElementsAre("雪", " 😀", " café"));
  EXPECT_THAT(pieces("Caffè già, perché l'AI è utile."),
              ElementsAre("Caffè", " già", ",", " perché", " l", "'AI", " è", " utile", "."));
  EXPECT_THAT(pieces("\n<function=get_weather>\n<parameter=city>\nRoma\n</parameter>"),
              ElementsAre("\n", "<function", "=get", "_weather", ">\n", "<parameter", "=city", ">\n", "Roma",
                          "\n", "</", "parameter", ">"));
}

TEST(Splitter, ContractionsIgnoreCaseAsUnicodeDoes) {
  EXPECT_THAT(pieces("'LLx'S"), ElementsAre("'LL", "x", "'S"));
  EXPECT_THAT(pieces("'\u017fab"), ElementsAre("'\u017f", "ab"));  // the long s
  EXPECT_THAT(pieces("'l"), ElementsAre("'l"));
  EXPECT_THAT(pieces("'xyz"), ElementsAre("'xyz"));
}

TEST(Splitter, InvalidBytesAreSymbols) {
  EXPECT_THAT(pieces("a\xFF\xFE"
                     "b"),
              ElementsAre("a", "\xFF\xFE", "b"));
  EXPECT_THAT(pieces(" \xF0\x9F\n"), ElementsAre(" \xF0\x9F\n"));
}

TEST(Splitter, LongRunsAreLinear) {
  const size_t n = 1 << 20;
  EXPECT_EQ(piece_size(std::string(n, ' '), 0), n);
  EXPECT_EQ(piece_size(std::string(n, ' ') + "x", 0), n - 1);
  EXPECT_EQ(piece_size(std::string(n, 'x'), 0), n);
  EXPECT_EQ(pieces(std::string(n, '7')).size(), n);
  // The run of spaces after the last line end is looked at again, but only once.
  EXPECT_EQ(pieces("\n" + std::string(n, ' ') + "x").size(), 3u);
}

}  // namespace
}  // namespace lily::text
