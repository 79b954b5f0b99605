#include "text/unicode.h"

#include <gtest/gtest.h>

#include <random>

#include "tests/text/golden_lines.h"

namespace lily::text {
namespace {

std::string repeated(std::string_view unit, size_t n) {
  std::string out;
  for (size_t i = 0; i < n; ++i) out += unit;
  return out;
}

TEST(Unicode, EveryScalarValueSurvivesTheRoundTrip) {
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xd800 && c < 0xe000) continue;
    std::string bytes;
    append_utf8(c, bytes);
    const Utf8Step step = decode_utf8(bytes, 0);
    ASSERT_TRUE(step.valid()) << static_cast<uint32_t>(c);
    ASSERT_EQ(step.n_bytes, bytes.size());
    ASSERT_EQ(step.code_point, c);
  }
}

TEST(Unicode, MaximalInvalidPartsBecomeOneReplacementEach) {
  const auto shown = [](std::string_view bytes) { return replace_invalid_utf8(bytes); };
  EXPECT_EQ(shown("\xF0\x9F("), "\uFFFD(");
  EXPECT_EQ(shown("\x98\x80"), "\uFFFD\uFFFD");
  EXPECT_EQ(shown("\xFF\xC0\xAF"), "\uFFFD\uFFFD\uFFFD");            // bytes that never occur
  EXPECT_EQ(shown("\xE0\x80\x80"), "\uFFFD\uFFFD\uFFFD");            // overlong
  EXPECT_EQ(shown("\xED\xA0\x80"), "\uFFFD\uFFFD\uFFFD");            // a surrogate
  EXPECT_EQ(shown("\xF4\x90\x80\x80"), "\uFFFD\uFFFD\uFFFD\uFFFD");  // above U+10FFFF
  EXPECT_EQ(shown("\xE4\xB8"), "\uFFFD");                            // cut
  EXPECT_EQ(shown("a\xE4\xB8\xADz"), "a中z");
}

TEST(Unicode, ClassesFollowTheStatedVersion) {
  EXPECT_EQ(kUnicodeVersion, "16.0.0");
  EXPECT_EQ(char_class('a'), CharClass::letter);
  EXPECT_EQ(char_class(0x0301), CharClass::mark);
  EXPECT_EQ(char_class(0x2167), CharClass::number);  // Roman numeral eight
  EXPECT_EQ(char_class(0x3000), CharClass::space);
  EXPECT_EQ(char_class(0x180e), CharClass::symbol);  // white space until Unicode 6.3
  EXPECT_EQ(char_class(0x1c), CharClass::symbol);
  EXPECT_EQ(char_class(0x16d40), CharClass::letter);  // new in Unicode 16
  EXPECT_EQ(char_class(0x10ffff), CharClass::symbol);
  // Counts of the Unicode Character Database, DerivedGeneralCategory-16.0.0.
  size_t n[5] = {};
  for (char32_t c = 0; c < 0x110000; ++c) ++n[static_cast<int>(char_class(c))];
  EXPECT_EQ(n[static_cast<int>(CharClass::letter)], 141028u);
  EXPECT_EQ(n[static_cast<int>(CharClass::mark)], 2501u);
  EXPECT_EQ(n[static_cast<int>(CharClass::number)], 1911u);
  EXPECT_EQ(n[static_cast<int>(CharClass::space)], 25u);
}

TEST(Unicode, NfcEqualsPython) {
  const auto golden = read_golden("tests/golden/text/nfc.jsonl");
  ASSERT_EQ(golden.rows.size(), 500u);
  int n_changed = 0;
  for (const auto& row : golden.rows) {
    const auto text = row["text"].get<std::string>(), nfc = row["nfc"].get<std::string>();
    EXPECT_EQ(to_nfc(text), nfc);
    EXPECT_TRUE(!is_plainly_nfc(text) || text == nfc) << text;
    n_changed += text != nfc;
  }
  EXPECT_GT(n_changed, 20);
}

TEST(Unicode, NfcKeepsInvalidBytesAndDoesNotComposeAcrossThem) {
  EXPECT_EQ(to_nfc("e\u0301"), "\u00e9");
  EXPECT_EQ(to_nfc("e\xFF\u0301\xF0\x9F"), "e\xFF\u0301\xF0\x9F");
  EXPECT_EQ(to_nfc("\xE4\xB8"
                   "e\u0301"),
            "\xE4\xB8\u00e9");
}

TEST(Unicode, NfcOfAMegabyteOfMarksIsNotQuadratic) {
  std::string marks = "a";
  marks += repeated("\u0307\u0323", 250'000);
  const std::string nfc = to_nfc(marks);
  // a + dot below compose to U+1EA1, whose dot above composes no further; then all lower marks come first.
  EXPECT_EQ(nfc.substr(0, 5), "\u1ea1\u0323");
  EXPECT_EQ(nfc.size(), 3 + 2 * 249'999u + 2 * 250'000u);
  EXPECT_EQ(nfc.substr(nfc.size() - 2), "\u0307");
}

TEST(Unicode, StripTakesWhatPythonTakes) {
  EXPECT_EQ(strip("\u3000\x1c a \u00a0\u2028"), "a");
  EXPECT_EQ(strip("\u200ba\u200b"), "\u200ba\u200b");  // zero-width space is not white space
  EXPECT_EQ(strip(" \n\t"), "");
  EXPECT_EQ(strip("\xFF \xFF"), "\xFF \xFF");
  EXPECT_EQ(strip_leading_newlines("\n\n a\n"), " a\n");
  EXPECT_EQ(strip_trailing_newlines("\n a\n\n"), "\n a");
  EXPECT_EQ(strip_trailing_newlines("\n\n"), "");
}

}  // namespace
}  // namespace lily::text
