#include "base/sha256.h"

#include <gtest/gtest.h>

namespace lily {
namespace {

// The examples of FIPS 180-2.
TEST(Sha256, PublishedExamples) {
  EXPECT_EQ(sha256_hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha256_hex(std::string(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, PiecesDoNotMatter) {
  const std::string bytes(1000, 'x');
  for (size_t step : {1, 7, 63, 64, 65, 129}) {
    Sha256 hash;
    for (size_t pos = 0; pos < bytes.size(); pos += step)
      hash.update(std::string_view(bytes).substr(pos, step));
    EXPECT_EQ(hash.finish_hex(), sha256_hex(bytes)) << step;
  }
}

}  // namespace
}  // namespace lily
