#include "base/file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include "base/error.h"

namespace lily {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

class FileTest : public testing::Test {
 protected:
  FileTest() {
    std::string name = (fs::temp_directory_path() / "lily-file-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
    for (int i = 0; i < 100'000; ++i) bytes_ += static_cast<char>(i * 31 % 251);
    std::ofstream(folder_ / "data", std::ios::binary) << bytes_;
  }
  ~FileTest() override { fs::remove_all(folder_); }

  template <typename Call>
  static std::string error_of(Call&& call) {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.fault(), Fault::device);
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
      return error.what();
    }
    ADD_FAILURE() << "no error";
    return {};
  }

  fs::path folder_;
  std::string bytes_;
};

TEST_F(FileTest, ReadsTheBytesAtAnOffset) {
  const File file = File::open(folder_ / "data");
  ASSERT_EQ(file.size(), bytes_.size());
  for (const auto& [offset, n] :
       {std::pair<size_t, size_t>{0, 1}, {1, 4097}, {99'999, 1}, {0, 100'000}, {100'000, 0}}) {
    std::string out(n, '?');
    file.read_at(offset, std::as_writable_bytes(std::span(out)));
    EXPECT_EQ(out, bytes_.substr(offset, n)) << offset;
  }
}

TEST_F(FileTest, ThreadsReadAtOnce) {
  const File file = File::open(folder_ / "data");
  file.expect_one_pass();
  std::atomic<int> n_wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::string out(997, '?');
      for (size_t offset = t; offset + out.size() < bytes_.size(); offset += 613) {
        file.read_at(offset, std::as_writable_bytes(std::span(out)));
        n_wrong += out != bytes_.substr(offset, out.size());
        file.release_cached(offset, out.size());
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(n_wrong, 0);
}

TEST_F(FileTest, AReadBeyondTheEndNamesPathOffsetAndSize) {
  const File file = File::open(folder_ / "data");
  std::vector<std::byte> out(10);
  for (const uint64_t offset : {uint64_t{99'991}, uint64_t{100'001}, UINT64_MAX, UINT64_MAX - 5})
    EXPECT_THAT(error_of([&] { file.read_at(offset, out); }),
                AllOf(HasSubstr("data"), HasSubstr(std::to_string(offset)), HasSubstr("100000 bytes")));
}

TEST_F(FileTest, AFileThatShrankIsAnErrorAndNoShortRead) {
  const File file = File::open(folder_ / "data");
  fs::resize_file(folder_ / "data", 50'000);
  std::vector<std::byte> out(60'000);
  EXPECT_THAT(error_of([&] { file.read_at(0, out); }),
              AllOf(HasSubstr("ended at byte 50000"), HasSubstr("100000 bytes when opened")));
}

TEST_F(FileTest, MovesAndDoesNotCopy) {
  static_assert(!std::is_copy_constructible_v<File> && !std::is_copy_assignable_v<File>);
  File first = File::open(folder_ / "data");
  File second = std::move(first);
  std::ofstream(folder_ / "other") << "xyz";
  first = File::open(folder_ / "other");
  std::string out(3, '?');
  second.read_at(0, std::as_writable_bytes(std::span(out)));
  EXPECT_EQ(out, bytes_.substr(0, 3));
  second = std::move(first);
  second.read_at(0, std::as_writable_bytes(std::span(out)));
  EXPECT_EQ(out, "xyz");
}

TEST_F(FileTest, OnlyRegularFilesOpen) {
  EXPECT_THAT(error_of([&] { File::open(folder_ / "none"); }),
              AllOf(HasSubstr("none"), HasSubstr("cannot be opened")));
  EXPECT_THAT(error_of([&] { File::open(folder_); }), HasSubstr("not a regular file"));
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  EXPECT_THAT(error_of([&] { File::open(folder_ / "pipe"); }), HasSubstr("not a regular file"));
  fs::create_symlink(folder_ / "data", folder_ / "link");
  EXPECT_EQ(File::open(folder_ / "link").size(), bytes_.size());
}

TEST_F(FileTest, ATextFileIsReadWholeUpToItsLimit) {
  EXPECT_EQ(read_text_file(folder_ / "data", 100'000), bytes_);
  EXPECT_THAT(error_of([&] { read_text_file(folder_ / "data", 99'999); }),
              AllOf(HasSubstr("100000 bytes"), HasSubstr("99999")));
  std::ofstream(folder_ / "empty").close();
  EXPECT_EQ(read_text_file(folder_ / "empty", 0), "");
}

}  // namespace
}  // namespace lily
