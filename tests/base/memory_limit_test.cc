#include "base/memory_limit.h"

#include <gtest/gtest.h>

#include "tests/support/temp_folder.h"

namespace lily {
namespace {

namespace fs = std::filesystem;

class CgroupLimit : public testing::Test {
 protected:
  void put(const std::string& file, const std::string& text) {
    fs::create_directories((folder_.path() / file).parent_path());
    test::write_file(folder_.path() / file, text);
  }
  int64_t limit() const { return cgroup_limit(folder_.path() / "cgroup", folder_.path() / "fs"); }
  test::TempFolder folder_;
};

TEST_F(CgroupLimit, OfVersion2IsTheSmallestUpToTheRoot) {
  put("cgroup", "0::/a/b\n");
  put("fs/a/b/memory.max", "max\n");
  EXPECT_EQ(limit(), 0);
  put("fs/a/memory.max", "2000000000\n");
  EXPECT_EQ(limit(), 2000000000);
  put("fs/a/b/memory.max", "1000000000\n");
  EXPECT_EQ(limit(), 1000000000);
  put("fs/memory.max", "500000000\n");  // what a container sees of itself
  EXPECT_EQ(limit(), 500000000);
}

TEST_F(CgroupLimit, OfVersion1IsThatOfTheMemoryController) {
  put("cgroup", "7:cpu,cpuacct:/c\n5:memory:/c\n");
  put("fs/memory/c/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(limit(), 0);
  put("fs/memory/c/memory.limit_in_bytes", "3000000000\n");
  EXPECT_EQ(limit(), 3000000000);
}

TEST_F(CgroupLimit, WhatCannotBeReadIsNoLimit) {
  EXPECT_EQ(limit(), 0);
  put("cgroup", "garbage\n0::\n::\n0::/../..\n");
  EXPECT_EQ(limit(), 0);
}

TEST_F(CgroupLimit, WhatIsLeftCountsFilesAsFree) {
  const auto left = [&] { return cgroup_available(folder_.path() / "cgroup", folder_.path() / "fs"); };
  put("cgroup", "0::/a/b\n");
  EXPECT_EQ(left(), -1);
  put("fs/a/memory.max", "1000\n");
  put("fs/a/memory.current", "900\n");
  put("fs/a/memory.stat", "active_file 700\ninactive_file 50\n");
  EXPECT_EQ(left(), 150);
  put("fs/a/b/memory.max", "500\n");
  put("fs/a/b/memory.current", "480\n");
  EXPECT_EQ(left(), 20);
  put("fs/a/b/memory.current", "700\n");
  EXPECT_EQ(left(), 0);
}

TEST(MemoryLimit, OfThisProcessIsLessThanTheMachineHas) {
  EXPECT_GT(resident_memory(), int64_t{1} << 20);
  EXPECT_LT(resident_memory(), memory_limit());
  EXPECT_GT(available_memory(), 0);
  EXPECT_LE(available_memory(), memory_limit());
}

TEST(MemoryLimit, OfThisMachineIsKnown) { EXPECT_GT(memory_limit(), int64_t{64} << 20); }

}  // namespace
}  // namespace lily
