#include "hub/repository.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/error_of.h"

namespace lily::hub {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

json listing_of(std::initializer_list<const char*> names) {
  json listing = {{"sha", std::string(40, 'c')}, {"siblings", json::array()}};
  for (const char* name : names)
    listing["siblings"].push_back({{"rfilename", name}, {"size", 10}, {"blobId", std::string(40, 'b')}});
  return listing;
}

std::vector<std::string> names(const std::vector<RemoteFile>& files) {
  std::vector<std::string> out;
  for (const RemoteFile& file : files) out.push_back(file.name);
  return out;
}

std::string index_of(const json& weight_map) { return json{{"weight_map", weight_map}}.dump(); }

TEST(Repository, NamesHaveTwoPlainParts) {
  EXPECT_TRUE(is_repository_name("mlx-community/Qwen3.6-35B-A3B-4bit"));
  for (const char* name :
       {"", "a", "a/b/c", "/b", "a/", "../b", "a/..", "a/.b", "-a/b", "a b/c", "a/b\n", "a--b/c", "a/b?x=1"})
    EXPECT_FALSE(is_repository_name(name)) << name;
  EXPECT_TRUE(is_revision_name("main"));
  for (const char* name : {"", "refs/pr/1", "..", "a b", "-x"}) EXPECT_FALSE(is_revision_name(name)) << name;
}

TEST(Repository, LargeFilesAreNamedBySha256AndSmallOnesByGit) {
  json listing = listing_of({"config.json"});
  listing["siblings"].push_back({{"rfilename", "model.safetensors"},
                                 {"size", 500},
                                 {"blobId", std::string(40, 'd')},
                                 {"lfs", {{"sha256", std::string(64, 'e')}, {"size", 500}}}});
  const Listing parsed = parse_listing(listing.dump());
  EXPECT_EQ(parsed.commit, std::string(40, 'c'));
  EXPECT_EQ(parsed.find("config.json")->blob_id, std::string(40, 'b'));
  EXPECT_EQ(parsed.find("model.safetensors")->blob_id, std::string(64, 'e'));
  EXPECT_EQ(parsed.find("model.safetensors")->n_bytes, 500u);
  EXPECT_EQ(parsed.find("nothing"), nullptr);
}

TEST(Repository, WhatIsNoListingIsRefused) {
  for (const char* text : {"", "[]", "null", "<html>", "{\"sha\": 1}", "{\"siblings\": []}",
                           "{\"sha\": \"../x\", \"siblings\": []}",
                           "{\"sha\": \"cccccccccccccccccccccccccccccccccccccccc\", \"siblings\": {}}",
                           "{\"sha\": \"cccccccccccccccccccccccccccccccccccccccc\", \"siblings\": [1]}"})
    EXPECT_FALSE(test::error_of([&] { parse_listing(text); }).empty()) << text;
  EXPECT_THAT(test::error_of([&] { parse_listing(std::string(100'000, '[')); }),
              HasSubstr("not a description"));
  EXPECT_THAT(test::error_of([&] { parse_listing(listing_of({"a", "a"}).dump()); }), HasSubstr("twice"));
}

TEST(Repository, AFileWithoutAChecksumOrASizeIsRefused) {
  const auto refused = [](const char* key, const json& value) {
    json listing = listing_of({"config.json", "tokenizer.json", "model.safetensors"});
    listing["siblings"][2][key] = value;
    EXPECT_THAT(test::error_of([&] { choose_files(parse_listing(listing.dump()), ""); }),
                HasSubstr("no checksum"))
        << key << " " << value;
  };
  refused("blobId", nullptr);
  refused("blobId", "../../../../../../../../../../etc/passwd1");
  refused("size", -1);
  refused("size", "10");
  refused("size", uint64_t{1} << 50);
  refused("lfs", {{"sha256", "x"}, {"size", 10}});
}

TEST(Repository, WhatTheEngineReadsIsChosen) {
  const Choice choice = choose_files(
      parse_listing(
          listing_of({".gitattributes", "README.md", "chat_template.jinja", "config.json", "merges.txt",
                      "model.safetensors", "original/model.safetensors", "tokenizer.json",
                      "pytorch_model.bin", "consolidated.safetensors", "mtp.safetensors"})
              .dump()),
      "");
  EXPECT_THAT(names(choice.wanted),
              ElementsAre("chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"));
  EXPECT_THAT(names(choice.vision), ElementsAre("mtp.safetensors"));
  EXPECT_EQ(choice.unneeded.size(), 6u);
}

TEST(Repository, FilesOfVisionWeightsOnlyAreSkipped) {
  const auto listing = parse_listing(
      listing_of({"config.json", "tokenizer.json", kIndexFile, "model-00001-of-00002.safetensors",
                  "model-00002-of-00002.safetensors", "vision.safetensors"})
          .dump());
  const Choice choice =
      choose_files(listing, index_of({{"model.norm.weight", "model-00001-of-00002.safetensors"},
                                      {"vision_tower.a", "model-00002-of-00002.safetensors"},
                                      {"lm_head.weight", "model-00002-of-00002.safetensors"},
                                      {"vision_tower.b", "vision.safetensors"}}));
  EXPECT_THAT(names(choice.vision), ElementsAre("vision.safetensors"));
  EXPECT_EQ(choice.wanted.size(), 5u);
}

TEST(Repository, WhatIsMissingIsNamed) {
  const auto error = [](std::initializer_list<const char*> files, const std::string& index = "") {
    return test::error_of([&] { choose_files(parse_listing(listing_of(files).dump()), index); });
  };
  EXPECT_THAT(error({"tokenizer.json", "model.safetensors"}), HasSubstr("no config.json"));
  EXPECT_THAT(error({"config.json", "model.safetensors"}), HasSubstr("no tokenizer.json"));
  EXPECT_THAT(error({"config.json", "tokenizer.json"}), HasSubstr("no safetensors file"));
  EXPECT_THAT(error({"model-Q4_K_M.gguf"}), HasSubstr("GGUF"));
  EXPECT_THAT(error({"config.json", "tokenizer.json", "model-00001-of-00002.safetensors"},
                    index_of({{"model.a", "model-00001-of-00002.safetensors"},
                              {"model.b", "model-00002-of-00002.safetensors"}})),
              HasSubstr("names model-00002-of-00002.safetensors"));
  EXPECT_THAT(error({"config.json", "tokenizer.json"}, index_of({{"model.a", "../../x.safetensors"}})),
              HasSubstr("plain name"));
}

}  // namespace
}  // namespace lily::hub
