#include "cli/line_editor.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>

namespace lily::cli {
namespace {

std::vector<Key> decode(std::string_view bytes) {
  KeyDecoder decoder;
  std::vector<Key> keys;
  for (const char byte : bytes)
    if (auto key = decoder.push(byte)) keys.push_back(*key);
  return keys;
}

TEST(KeyDecoder, CharactersOfSeveralBytesAreOneKey) {
  const auto keys = decode("aé😀");
  ASSERT_EQ(keys.size(), 3u);
  EXPECT_EQ(keys[1].text, "é");
  EXPECT_EQ(keys[2].text, "😀");
}

TEST(KeyDecoder, APasteIsOneTextWithItsLineBreaks) {
  const auto keys = decode("\x1b[200~one\r\ntwo\rthree\x07\x1b[201~\r");
  ASSERT_EQ(keys.size(), 2u);
  EXPECT_EQ(keys[0].text, "one\ntwo\nthree");
  EXPECT_EQ(keys[1].kind, Key::Kind::enter);
}

TEST(KeyDecoder, KnowsTheKeysOfCommonTerminals) {
  using Kind = Key::Kind;
  const std::pair<const char*, Kind> cases[] = {{"\x1b[A", Kind::up},
                                                {"\x1bOA", Kind::up},
                                                {"\x1b[D", Kind::left},
                                                {"\x1b[H", Kind::home},
                                                {"\x1b[4~", Kind::end},
                                                {"\x1b[3~", Kind::erase},
                                                {"\x1b[1;5C", Kind::word_right},
                                                {"\x1b\r", Kind::newline},
                                                {"\n", Kind::newline},
                                                {"\x7f", Kind::backspace},
                                                {"\x03", Kind::interrupt},
                                                {"\x04", Kind::end_of_input}};
  for (const auto& [bytes, kind] : cases) {
    const auto keys = decode(bytes);
    ASSERT_EQ(keys.size(), 1u) << bytes;
    EXPECT_EQ(keys[0].kind, kind) << bytes;
  }
}

TEST(KeyDecoder, UnknownSequencesAndBrokenBytesAreDropped) {
  EXPECT_EQ(decode("\x1b[99;99X\x80\xff"
                   "a")
                .size(),
            1u);
  EXPECT_EQ(decode("\xc3"
                   "a")
                .size(),
            1u);  // a lead byte without its continuation
}

TEST(EditBuffer, TheCursorMovesByCharacters) {
  EditBuffer b;
  b.insert("aé😀");
  b.left();
  EXPECT_EQ(b.cursor(), 3u);
  b.left();
  EXPECT_EQ(b.cursor(), 1u);
  b.erase();
  EXPECT_EQ(b.text(), "a😀");
  b.line_end();
  b.backspace();
  EXPECT_EQ(b.text(), "a");
}

TEST(EditBuffer, LinesAreWalkedUpAndDown) {
  EditBuffer b;
  b.insert("first\nxy\nthird");
  EXPECT_FALSE(b.line_down());
  EXPECT_TRUE(b.line_up());
  EXPECT_EQ(b.cursor(), 8u);  // the end of the shorter line
  EXPECT_TRUE(b.line_up());
  EXPECT_EQ(b.cursor(), 2u);
  EXPECT_FALSE(b.line_up());
}

TEST(EditBuffer, WordsAndLinesAreErased) {
  EditBuffer b;
  b.insert("one two  three\nfour");
  b.line_up();
  b.line_end();
  b.erase_word();
  EXPECT_EQ(b.text(), "one two  \nfour");
  b.erase_to_line_start();
  EXPECT_EQ(b.text(), "\nfour");
}

TEST(LineEditor, HistorySurvivesItsFile) {
  const auto path = std::filesystem::temp_directory_path() / "lily_history_test";
  LineEditor writer;
  writer.add_history("plain");
  writer.add_history("two\nlines with \\ and \\n");
  writer.add_history("two\nlines with \\ and \\n");  // repeated: kept once
  writer.save_history(path.string());
  LineEditor reader;
  reader.load_history(path.string());
  EXPECT_EQ(reader.history(), writer.history());
  EXPECT_EQ(reader.history().size(), 2u);
  std::filesystem::remove(path);
}

TEST(LineEditor, WidthsFollowTheTerminal) {
  EXPECT_EQ(display_width("abc"), 3);
  EXPECT_EQ(display_width("東京"), 4);
  EXPECT_EQ(display_width("e\u0301"), 1);
  EXPECT_EQ(display_width("\xff"), 1);
}

}  // namespace
}  // namespace lily::cli
