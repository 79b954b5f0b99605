// A hub, an empty cache, and the program between them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "hub/blob_hash.h"
#include "tests/hub/child.h"
#include "tests/hub/test_hub.h"
#include "tests/support/golden.h"
#include "tests/support/temp_folder.h"

namespace lily::test {

struct Ended {
  int exit_code = -1;
  std::string out, err;
};

class PullRig : public testing::Test {
 protected:
  std::map<std::string, std::string> environment() const {
    auto all = extra;
    all.insert({{"HOME", home.path().string()}, {"HF_ENDPOINT", hub.endpoint()}});
    return all;
  }
  Ended lily(const std::vector<std::string>& arguments) const {
    Child child(arguments, environment());
    const int exit_code = child.wait();
    return {exit_code, child.out(), child.err()};
  }
  Ended pull(std::vector<std::string> more = {}) const {
    std::vector<std::string> arguments = {"pull", kTestRepository, "--piece-bytes", "2000000"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return lily(arguments);
  }
  std::filesystem::path repository() const {
    return home.path() / ".cache/huggingface/hub/models--lily-models--tiny";
  }
  std::filesystem::path snapshot() const { return repository() / "snapshots" / kTestCommit; }
  std::filesystem::path blob(const std::string& name) const {
    return repository() / "blobs" / hub.blob_id(name);
  }

  // The files that the engine needs are there, byte for byte.
  void expect_whole() const {
    for (const char* name : kNeeded) {
      EXPECT_EQ(read_file(snapshot() / name), read_file(std::filesystem::path(kTinyModel) / name)) << name;
      EXPECT_EQ(std::filesystem::read_symlink(snapshot() / name),
                std::filesystem::path("../../blobs") / hub.blob_id(name));
    }
    EXPECT_EQ(read_file(repository() / "refs/main"), kTestCommit);
    for (const auto& entry : std::filesystem::directory_iterator(repository() / "blobs"))
      EXPECT_TRUE(hub::is_blob_id(entry.path().filename().string())) << entry.path();
  }
  // Whatever has happened, what has the name of a whole file is one, and what looks like a model is one.
  void expect_nothing_half() const {
    namespace fs = std::filesystem;
    if (fs::exists(repository() / "blobs"))
      for (const auto& entry : fs::directory_iterator(repository() / "blobs")) {
        const std::string id = entry.path().filename().string();
        if (hub::is_blob_id(id)) EXPECT_EQ(hub::blob_hash_of(id, read_file(entry.path())), id);
      }
    if (fs::exists(snapshot() / "config.json"))
      for (const char* name : kNeeded) EXPECT_TRUE(fs::exists(snapshot() / name)) << name;
    if (fs::exists(repository() / "refs/main")) EXPECT_TRUE(fs::exists(snapshot() / "config.json"));
  }

  static constexpr const char* kNeeded[] = {"config.json",
                                            "generation_config.json",
                                            "tokenizer.json",
                                            "tokenizer_config.json",
                                            "chat_template.jinja",
                                            "model.safetensors",
                                            "model.safetensors.index.json"};
  TempFolder home;
  TestHub hub{kTinyModel};
  std::map<std::string, std::string> extra;
};

// How often each line of the text that begins with "lily: " says something about going wrong is up to the
// test; the last line is the one that people read.
inline std::string last_line(const std::string& text) {
  const size_t end = text.find_last_not_of('\n');
  if (end == std::string::npos) return {};
  const size_t start = text.rfind('\n', end);
  return text.substr(start == std::string::npos ? 0 : start + 1,
                     end - (start == std::string::npos ? 0 : start + 1) + 1);
}

}  // namespace lily::test
