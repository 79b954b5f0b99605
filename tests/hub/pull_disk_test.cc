// lily pull onto a disk that becomes full: one clear line, nothing half-written that counts as whole, and the
// next pull goes on.
#include <sys/mount.h>

#include <chrono>
#include <fstream>
#include <thread>

#include "tests/hub/rig.h"

namespace lily::test {
namespace {

namespace fs = std::filesystem;

class FullDisk : public PullRig {
 protected:
  void expect_full(const Ended& run, const std::string& when) {
    EXPECT_EQ(run.exit_code, 1) << when << ": " << run.err;
    EXPECT_NE(last_line(run.err).find("the disk is full"), std::string::npos) << when << ": " << run.err;
    EXPECT_EQ(run.out, "");
    expect_nothing_half();
    EXPECT_FALSE(fs::exists(snapshot() / "config.json")) << when;
  }
};

TEST_F(FullDisk, EveryWriteMayBeTheOneThatFails) {
  extra["LD_PRELOAD"] = LILY_FULL_DISK;
  // The small files, the journals, then the weights.
  for (const int n : {0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 20, 100, 1000}) {
    extra["LILY_TEST_FULL_AFTER"] = std::to_string(n);
    expect_full(pull(), std::to_string(n) + " writes");
  }
  EXPECT_GT(hub.n_sent_of("model.safetensors"), 0u);
  extra.erase("LILY_TEST_FULL_AFTER");
  for (const char* moment : {"LILY_TEST_FULL_SYNC", "LILY_TEST_FULL_LINKS"}) {
    extra[moment] = "1";
    expect_full(pull(), moment);
    extra.erase(moment);
  }
  hub.forget_sent();
  const Ended run = pull();
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(hub.n_sent_of("model.safetensors"), 0u) << "what had arrived was kept";
  expect_whole();
}

// A small file system of its own, filled by somebody else while the download runs.
TEST_F(FullDisk, ARealOneThatFillsUpMeanwhile) {
#ifdef __linux__
  const fs::path cache = home.path() / ".cache/huggingface/hub";
  fs::create_directories(cache);
  // What has to be free beforehand, and no more: 64 MiB beside the model.
  const std::string size = "size=" + std::to_string(hub.n_bytes() + (uint64_t{68} << 20));
  if (mount("lily-test", cache.c_str(), "tmpfs", 0, size.c_str()) != 0)
    GTEST_SKIP() << "this user may not mount a file system";
  hub.set({.bytes_per_s = 2e6});
  Child child({"pull", kTestRepository, "--piece-bytes", "2000000"}, environment());
  while (hub.n_sent_of("model.safetensors") < 1'000'000)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  {
    std::ofstream filler(cache / "filler", std::ios::binary);
    const std::string block(1 << 20, 'x');
    while (filler.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) continue;
  }
  hub.set({});
  const int exit_code = child.wait();
  expect_full({exit_code, child.out(), child.err()}, "while fetching");
  // Still full: told before anything is fetched.
  const Ended again = pull();
  EXPECT_EQ(again.exit_code, 1);
  EXPECT_NE(last_line(again.err).find("ake room"), std::string::npos) << again.err;
  fs::remove(cache / "filler");
  const Ended run = pull();
  EXPECT_EQ(run.exit_code, 0) << run.err;
  expect_whole();
  EXPECT_EQ(umount2(cache.c_str(), MNT_DETACH), 0);
#else
  GTEST_SKIP() << "file systems are mounted on Linux only";
#endif
}

}  // namespace
}  // namespace lily::test
