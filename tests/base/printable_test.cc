#include "base/printable.h"

#include <gtest/gtest.h>

namespace lily {
namespace {

TEST(Printable, KeepsTextInAnyLanguage) {
  for (const char* text : {"", "model.layers.0", "Größe 東京 😀", "\xf4\x8f\xbf\xbf"})
    EXPECT_EQ(printable(text), text);
}

TEST(Printable, ControlCharactersAndLineEndsAreEscaped) {
  EXPECT_EQ(printable("a\nb\rc\td\x1b[31m\x7f"), "a\\x0ab\\x0dc\\x09d\\x1b[31m\\x7f");
  EXPECT_EQ(printable(std::string_view("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("\xc2\x85"), "\\xc2\\x85");           // NEL
  EXPECT_EQ(printable("\xe2\x80\xa8"), "\\xe2\\x80\\xa8");  // line separator
}

TEST(Printable, BytesThatAreNotUtf8AreEscaped) {
  EXPECT_EQ(printable("\xff"), "\\xff");
  EXPECT_EQ(printable("\xc0\xaf"), "\\xc0\\xaf");                    // overlong
  EXPECT_EQ(printable("\xe0\x80\x80"), "\\xe0\\x80\\x80");           // overlong
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");           // surrogate
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // above U+10FFFF
  EXPECT_EQ(printable("x\xe6\x9d"), "x\\xe6\\x9d");                  // cut off
}

TEST(Printable, LongTextIsCutBetweenCharacters) {
  EXPECT_EQ(printable("abcdef", 6), "abcdef");
  EXPECT_EQ(printable("abcdefg", 6), "abcdef...");
  EXPECT_EQ(printable("abcd東京", 6), "abcd...");
}

TEST(Counted, OneIsSingular) {
  EXPECT_EQ(counted(0, "prompt"), "0 prompts");
  EXPECT_EQ(counted(1, "prompt"), "1 prompt");
  EXPECT_EQ(counted(2, "prompt"), "2 prompts");
}

}  // namespace
}  // namespace lily
