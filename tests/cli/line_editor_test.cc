#include "cli/line_editor.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>

#include "tests/support/temp_folder.h"

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

class History : public testing::Test {
 protected:
  static std::vector<std::string> read(const std::filesystem::path& path) {
    LineEditor reader;
    reader.load_history(path.string());
    return reader.history();
  }
  test::TempFolder folder_;
  const std::filesystem::path path_ = folder_.path() / "history";
};

TEST_F(History, SurvivesItsFile) {
  const std::string lines[] = {"plain", "two\nlines with \\ and \\n"};
  for (const std::string& line : lines) EXPECT_TRUE(LineEditor::append_history(path_.string(), line));
  EXPECT_EQ(read(path_), (std::vector<std::string>{lines[0], lines[1]}));
}

TEST_F(History, OfTwoChatsIsKept) {
  LineEditor::append_history(path_.string(), "of the first");
  LineEditor::append_history(path_.string(), "of the second");
  LineEditor::append_history(path_.string(), "of the first again");
  EXPECT_EQ(read(path_).size(), 3u);
}

TEST_F(History, IsForItsOwnerAlone) {
  LineEditor::append_history(path_.string(), "a secret");
  EXPECT_EQ(std::filesystem::status(path_).permissions(),
            std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
}

TEST_F(History, ALongFileIsCutToItsNewestLines) {
  const std::string filler(1000, 'x');
  for (int i = 0; i < 1100; ++i) LineEditor::append_history(path_.string(), std::to_string(i) + filler);
  LineEditor::shorten_history(path_.string());
  EXPECT_LT(std::filesystem::file_size(path_), size_t{1} << 19);
  const std::vector<std::string> lines = read(path_);
  ASSERT_GT(lines.size(), 400u);
  EXPECT_EQ(lines.back(), "1099" + filler);
  EXPECT_EQ(lines.front(), std::to_string(1100 - lines.size()) + filler);
}

TEST(LineEditor, WidthsFollowTheTerminal) {
  EXPECT_EQ(display_width("abc"), 3);
  EXPECT_EQ(display_width("東京"), 4);
  EXPECT_EQ(display_width("e\u0301"), 1);
  EXPECT_EQ(display_width("\xff"), 1);
}

}  // namespace
}  // namespace lily::cli
