#include "hub/blob_hash.h"

#include <gtest/gtest.h>

#include "tests/support/temp_folder.h"

namespace lily::hub {
namespace {

std::string sha1(std::string_view text) {
  Sha1 hash;
  hash.update(text);
  return hash.finish_hex();
}

// The examples of FIPS 180-4 and its companion pages.
TEST(BlobHash, Sha1OfKnownTexts) {
  EXPECT_EQ(sha1(""), "da39a3ee5e6b4b0d3255bfef95601890afd80709");
  EXPECT_EQ(sha1("abc"), "a9993e364706816aba3e25717850c26c9cd0d89d");
  EXPECT_EQ(sha1("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "84983e441c3bd26ebaae4aa1f95129e5e54670f1");
  Sha1 million;
  for (int i = 0; i < 1000; ++i) million.update(std::string(1000, 'a'));
  EXPECT_EQ(million.finish_hex(), "34aa973cd4c4daa4f61eeb2bdbad27316534016f");
}

// `git hash-object`
TEST(BlobHash, GitNamesOfSmallFiles) {
  EXPECT_EQ(blob_hash_of(std::string(40, '0'), ""), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
  EXPECT_EQ(blob_hash_of(std::string(40, '0'), "hello\n"), "ce013625030ba8dba906f756967f9e9ca394464a");
}

TEST(BlobHash, AFileHasTheNameOfItsContent) {
  const test::TempFolder folder;
  const std::string content(3'000'000, 'x');
  test::write_file(folder.path() / "file", content);
  for (const size_t digits : {40, 64}) {
    const std::string like(digits, '0');
    EXPECT_EQ(blob_hash_of_file(like, folder.path() / "file", [](uint64_t) { return true; }),
              blob_hash_of(like, content));
    EXPECT_FALSE(blob_hash_of_file(like, folder.path() / "file", [](uint64_t) { return false; }));
  }
}

TEST(BlobHash, OnlyHexadecimalNamesOfTheRightLengthAreNames) {
  EXPECT_TRUE(is_blob_id(std::string(64, 'a')));
  EXPECT_TRUE(is_blob_id(std::string(40, '0')));
  EXPECT_FALSE(is_blob_id(std::string(41, '0')));
  EXPECT_FALSE(is_blob_id(std::string(64, 'A')));
  EXPECT_FALSE(is_blob_id("../" + std::string(37, 'a')));
  EXPECT_FALSE(is_blob_id(""));
}

}  // namespace
}  // namespace lily::hub
