#include "hub/cache.h"

#include <gtest/gtest.h>

#include "tests/support/error_of.h"
#include "tests/support/temp_folder.h"

namespace lily::hub {
namespace {

namespace fs = std::filesystem;

const std::string kName = "owner/name";
const std::string kOld(40, 'a'), kNew(40, 'b');

class Cache : public testing::Test {
 protected:
  // A snapshot with an index of two shards, of which `n_shards` are there.
  void add(const std::string& commit, int n_shards) {
    const fs::path snapshot = cached.snapshot(commit);
    fs::create_directories(snapshot);
    test::write_file(snapshot / "config.json", "{}");
    test::write_file(snapshot / "model.safetensors.index.json",
                     R"({"weight_map": {"model.a": "model-00001-of-00002.safetensors",
                         "vision_tower.a": "vision.safetensors", "model.b": "model-00002-of-00002.safetensors"}})");
    for (int i = 1; i <= n_shards; ++i)
      test::write_file(snapshot / ("model-0000" + std::to_string(i) + "-of-00002.safetensors"), "x");
  }
  test::TempFolder folder;
  CachedRepository cached{folder.path(), kName};
};

TEST_F(Cache, ASnapshotCountsWhenItsTextWeightsAreThere) {
  EXPECT_FALSE(cached.find_model());
  add(kOld, 1);
  EXPECT_FALSE(cached.find_model());
  add(kOld, 2);
  EXPECT_EQ(cached.find_model(), cached.snapshot(kOld));
}

TEST_F(Cache, TheReferenceWinsWhenItsSnapshotIsWhole) {
  add(kOld, 2);
  add(kNew, 2);
  fs::last_write_time(cached.snapshot(kOld), fs::file_time_type::clock::now() - std::chrono::hours(1));
  EXPECT_EQ(cached.find_model(), cached.snapshot(kNew)) << "the newest";
  fs::create_directories(cached.folder() / "refs");
  test::write_file(cached.folder() / "refs/main", kOld);
  EXPECT_EQ(cached.find_model(), cached.snapshot(kOld));
  fs::remove(cached.snapshot(kOld) / "model-00002-of-00002.safetensors");
  EXPECT_EQ(cached.find_model(), cached.snapshot(kNew));
  test::write_file(cached.folder() / "refs/main", "../../../elsewhere");
  EXPECT_EQ(cached.find_model(), cached.snapshot(kNew));
}

TEST_F(Cache, ALinkIntoNothingIsNoFile) {
  add(kOld, 1);
  fs::create_symlink("../../blobs/gone", cached.snapshot(kOld) / "model-00002-of-00002.safetensors");
  EXPECT_FALSE(cached.find_model());
}

TEST_F(Cache, PublishLinksTheConfigurationLastAndKeepsTheRest) {
  cached.make_folders();
  const std::string config(40, '1'), weights(64, '2');
  cached.write_blob(config, "{}");
  cached.write_blob(weights, "w");
  fs::create_directories(cached.snapshot(kNew));
  test::write_file(cached.snapshot(kNew) / "merges.txt", "of another tool");
  cached.publish(kNew, "main", {{"config.json", config}, {"model.safetensors", weights}});
  EXPECT_EQ(test::read_file(cached.snapshot(kNew) / "model.safetensors"), "w");
  EXPECT_EQ(fs::read_symlink(cached.snapshot(kNew) / "config.json"), "../../blobs/" + config);
  EXPECT_EQ(test::read_file(cached.snapshot(kNew) / "merges.txt"), "of another tool");
  EXPECT_EQ(test::read_file(cached.folder() / "refs/main"), kNew);
  EXPECT_EQ(cached.find_model(), cached.snapshot(kNew));
}

TEST_F(Cache, LeftoversOfAKilledWriterAreRemovedAndDownloadsKept) {
  cached.make_folders();
  const std::string id(64, '2');
  for (const char* end : {".lily-new", ".lily-done"})
    test::write_file(cached.blob(std::string(64, '1') + end), "x");
  for (const char* end : {".lily-part", ".lily-done", ".incomplete"})
    test::write_file(cached.blob(id + end), "x");
  cached.make_folders();
  EXPECT_EQ(std::distance(fs::directory_iterator(cached.folder() / "blobs"), fs::directory_iterator()), 3);
  EXPECT_TRUE(fs::exists(cached.blob(id + ".lily-done")));
}

TEST_F(Cache, RemovingFollowsNoLink) {
  const test::TempFolder outside;
  test::write_file(outside.path() / "precious", "x");
  add(kOld, 2);
  fs::create_directory_symlink(outside.path(), cached.snapshot(kOld) / "linked");
  cached.remove();
  EXPECT_FALSE(fs::exists(cached.folder()));
  EXPECT_TRUE(fs::exists(outside.path() / "precious"));
}

TEST_F(Cache, ALockIsHeldByOne) {
  const RepositoryLock first(folder.path(), kName);
  EXPECT_NE(test::error_of([&] { RepositoryLock(folder.path(), kName); }).find("another lily"),
            std::string::npos);
  const RepositoryLock other(folder.path(), "owner/other");
}

TEST_F(Cache, TheListTellsWholeModelsFromOthers) {
  EXPECT_TRUE(list_cache(folder.path() / "none").empty());
  add(kOld, 2);
  fs::create_directories(folder.path() / "datasets--a--b");
  fs::create_directories(folder.path() / "models--x--.." / "blobs");
  fs::create_directories(cached.folder() / "blobs");
  test::write_file(cached.folder() / "blobs" / std::string(40, '1'), "12345");
  const auto models = list_cache(folder.path());
  ASSERT_EQ(models.size(), 1u);
  EXPECT_EQ(models[0].name, kName);
  EXPECT_EQ(models[0].model, cached.snapshot(kOld));
  EXPECT_FALSE(models[0].is_supported);  // its config.json is empty
  EXPECT_EQ(models[0].n_bytes, 5u);
}

}  // namespace
}  // namespace lily::hub
