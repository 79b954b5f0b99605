#include "hub/part_file.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "tests/support/error_of.h"
#include "tests/support/temp_folder.h"

namespace lily::hub {
namespace {

namespace fs = std::filesystem;

class PartFiles : public testing::Test {
 protected:
  test::TempFolder folder;
  const fs::path path = folder.path() / "blob";
};

TEST_F(PartFiles, PiecesInAnyOrderMakeTheFile) {
  PartFile part(path, 10, 4);
  ASSERT_EQ(part.n_pieces(), 3);
  part.append(2, "ij");
  part.append(0, "ab");
  part.append(1, "efgh");
  EXPECT_EQ(part.n_present(), 8u);
  part.append(0, "cd");
  EXPECT_FALSE(fs::exists(path));
  part.publish();
  EXPECT_EQ(test::read_file(path), "abcdefghij");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()), 1);
}

TEST_F(PartFiles, TheNextOneGoesOnWithThePiecesOfTheFirst) {
  {
    PartFile(path, 10, 4).append(1, "ef");
  }
  PartFile part(path, 10, 1000);
  EXPECT_EQ(part.n_pieces(), 3);
  EXPECT_EQ(part.next_of(0), 0u);
  EXPECT_EQ(part.next_of(1), 6u);
  EXPECT_EQ(part.n_present(), 2u);
  EXPECT_EQ(PartFile::present_at(path), 2u);
}

TEST_F(PartFiles, AnotherSizeBeginsAnew) {
  {
    PartFile(path, 10, 4).append(1, "ef");
  }
  EXPECT_EQ(PartFile(path, 11, 4).n_present(), 0u);
}

TEST_F(PartFiles, ADamagedJournalBeginsAnew) {
  const fs::path journal = path.string() + ".lily-done";
  for (int fault = 0; fault < 5; ++fault) {
    PartFile::remove(path);
    {
      PartFile(path, 10, 4).append(1, "ef");
    }
    std::string bytes = test::read_file(journal);
    if (fault == 0) bytes.clear();
    if (fault == 1) bytes.resize(bytes.size() - 1);
    if (fault == 2) bytes[0] = 'L';
    if (fault == 3) bytes[40] = 5;  // more than its piece holds
    if (fault == 4) bytes[24] = 0;  // pieces of no bytes
    test::write_file(journal, bytes);
    EXPECT_EQ(PartFile(path, 10, 4).n_present(), 0u) << fault;
  }
}

TEST_F(PartFiles, AJournalWithoutItsDataBeginsAnew) {
  {
    PartFile(path, 10, 4).append(1, "ef");
  }
  fs::resize_file(path.string() + ".lily-part", 3);
  EXPECT_EQ(PartFile::present_at(path), 0u);
  EXPECT_EQ(PartFile(path, 10, 4).n_present(), 0u);
}

TEST_F(PartFiles, ALinkIsNotFollowed) {
  test::write_file(folder.path() / "precious", "0123456789");
  fs::create_symlink(folder.path() / "precious", path.string() + ".lily-part");
  PartFile(path, 10, 4).append(0, "xxxx");
  EXPECT_EQ(test::read_file(folder.path() / "precious"), "0123456789");
}

TEST_F(PartFiles, RestartForgets) {
  PartFile part(path, 10, 4);
  part.append(0, "ab");
  part.restart();
  EXPECT_EQ(part.n_present(), 0u);
  part.append(0, "cd");
  EXPECT_EQ(test::read_file(part.data_path()).substr(0, 4), std::string("cd\0\0", 4));
}

TEST_F(PartFiles, AnEmptyFileIsWholeAtOnce) {
  PartFile part(path, 0, 4);
  EXPECT_EQ(part.next_of(0), part.end_of(0));
  part.publish();
  EXPECT_EQ(fs::file_size(path), 0u);
}

TEST_F(PartFiles, AFolderThatIsNotThereIsAnError) {
  EXPECT_NE(test::error_of([&] { PartFile(folder.path() / "none/blob", 10, 4); }).find("none/blob"),
            std::string::npos);
}

}  // namespace
}  // namespace lily::hub
