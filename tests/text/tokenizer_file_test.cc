#include "text/tokenizer_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "text/splitter.h"
#include "text/tokenizer.h"

namespace lily::text {
namespace {

using nlohmann::ordered_json;
using testing::HasSubstr;

// A small tokenizer.json: the 256 bytes, "ab" and "abc".
ordered_json small_file() {
  static const ordered_json kBytes = [] {
    ordered_json bytes = ordered_json::object();
    const auto tiny = ordered_json::parse(std::ifstream("models/lily-tiny/tokenizer.json"));
    for (const auto& [spelled, id] : tiny["model"]["vocab"].items())
      if (id < 256) bytes[spelled] = id;
    return bytes;
  }();
  ordered_json vocab = kBytes;
  vocab["ab"] = 256;
  vocab["abc"] = 257;
  return {{"added_tokens", {{{"id", 258}, {"content", "<x>"}, {"special", true}, {"normalized", false}}}},
          {"normalizer", {{"type", "NFC"}}},
          {"pre_tokenizer",
           {{"type", "Sequence"},
            {"pretokenizers",
             {{{"type", "Split"}, {"pattern", {{"Regex", kSplitPattern}}}, {"behavior", "Isolated"}},
              {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}}},
          {"model", {{"type", "BPE"}, {"dropout", nullptr}, {"vocab", vocab}, {"merges", {"a b", "ab c"}}}}};
}

std::string error_of(const ordered_json& file, const std::string& config = "") {
  try {
    parse_tokenizer(file.dump(), config);
  } catch (const Error& error) {
    EXPECT_EQ(error.fault(), Fault::model);
    return error.what();
  }
  return "";
}

TEST(TokenizerFile, BothFormsOfMergesAreRead) {
  auto file = small_file();
  const Tokenizer strings(parse_tokenizer(file.dump(), ""));
  file["model"]["merges"] = ordered_json::parse(R"([["a", "b"], ["ab", "c"]])");
  const Tokenizer pairs(parse_tokenizer(file.dump(), ""));
  for (const auto* tokenizer : {&strings, &pairs}) {
    EXPECT_EQ(tokenizer->encode("abcab", AddedTokens::all), (std::vector<int32_t>{257, 256}));
    EXPECT_EQ(tokenizer->encode("<x>", AddedTokens::all), (std::vector<int32_t>{258}));
    EXPECT_EQ(tokenizer->n_tokens(), 259);
  }
}

TEST(TokenizerFile, MergesMayComeBeforeTheVocabulary) {
  auto file = small_file();
  const auto vocab = file["model"]["vocab"];
  file["model"].erase("vocab");
  file["model"]["vocab"] = vocab;
  EXPECT_EQ(Tokenizer(parse_tokenizer(file.dump(), "")).encode("abc", AddedTokens::none),
            (std::vector<int32_t>{257}));
}

TEST(TokenizerFile, AddedTokensComeFromBothFiles) {
  const std::string config = R"({"tokenizer_class": "NoSuchTokenizer", "added_tokens_decoder": {
    "258": {"content": "<x>", "special": false}, "300": {"content": "<y>", "special": true}}})";
  const Tokenizer tokenizer(parse_tokenizer(small_file().dump(), config));
  EXPECT_EQ(tokenizer.n_tokens(), 301);
  EXPECT_EQ(tokenizer.id_of("<y>"), 300);
  EXPECT_TRUE(tokenizer.is_special(300));
  EXPECT_FALSE(tokenizer.is_special(258));    // the second file counts
  EXPECT_EQ(tokenizer.token_bytes(299), "");  // a gap
}

TEST(TokenizerFile, LongestAddedTokenWins) {
  auto file = small_file();
  file["added_tokens"].push_back({{"id", 259}, {"content", "<x><x>"}, {"special", false}});
  file["added_tokens"].push_back({{"id", 260}, {"content", "<x>b"}, {"special", false}});
  const Tokenizer tokenizer(parse_tokenizer(file.dump(), ""));
  EXPECT_EQ(tokenizer.encode("<x><x><x>b<x>", AddedTokens::all), (std::vector<int32_t>{259, 260, 258}));
}

TEST(TokenizerFile, WhatWeDoNotImplementIsRefusedByName) {
  const auto with = [](auto change) {
    auto file = small_file();
    change(file);
    return error_of(file);
  };
  EXPECT_THAT(with([](auto& f) { f["model"]["type"] = "Unigram"; }), HasSubstr("model.type is Unigram"));
  EXPECT_THAT(with([](auto& f) { f["model"]["dropout"] = 0.1; }), HasSubstr("dropout"));
  EXPECT_THAT(with([](auto& f) { f["model"]["byte_fallback"] = true; }), HasSubstr("byte_fallback"));
  EXPECT_THAT(with([](auto& f) { f["model"]["ignore_merges"] = true; }), HasSubstr("ignore_merges"));
  EXPECT_THAT(with([](auto& f) { f["normalizer"] = nullptr; }), HasSubstr("normalizer is absent"));
  EXPECT_THAT(with([](auto& f) { f["normalizer"]["type"] = "NFKC"; }), HasSubstr("NFKC"));
  EXPECT_THAT(with([](auto& f) { f["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "\\w+"; }),
              HasSubstr("\\w+"));
  EXPECT_THAT(with([](auto& f) { f["pre_tokenizer"]["pretokenizers"][1]["use_regex"] = true; }),
              HasSubstr("use_regex"));
  EXPECT_THAT(with([](auto& f) { f["added_tokens"][0]["lstrip"] = true; }), HasSubstr("<x> has lstrip set"));
}

TEST(TokenizerFile, DamageIsRefusedByName) {
  const auto with = [](auto change) {
    auto file = small_file();
    change(file);
    return error_of(file);
  };
  EXPECT_THAT(with([](auto& f) { f["model"].erase("vocab"); }), HasSubstr("model.vocab is missing"));
  EXPECT_THAT(with([](auto& f) { f["model"].erase("merges"); }), HasSubstr("model.merges is missing"));
  EXPECT_THAT(with([](auto& f) { f["model"]["vocab"].erase("a"); }), HasSubstr("byte 0x61"));
  EXPECT_THAT(with([](auto& f) { f["model"]["vocab"]["ab"] = 257; }), HasSubstr("id 257 appears twice"));
  EXPECT_THAT(with([](auto& f) { f["model"]["vocab"]["ab"] = -1; }), HasSubstr("out of range"));
  EXPECT_THAT(with([](auto& f) { f["model"]["vocab"]["ab"] = 4'000'000'000u; }), HasSubstr("out of range"));
  EXPECT_THAT(with([](auto& f) { f["model"]["vocab"]["ab"] = 1.5; }), HasSubstr("1.5"));
  EXPECT_THAT(with([](auto& f) { f["model"]["vocab"]["ab"] = "256"; }), HasSubstr("not an integer"));
  EXPECT_THAT(with([](auto& f) { f["model"]["vocab"]["ab"] = {1}; }), HasSubstr("nested"));
  EXPECT_THAT(with([](auto& f) { f["model"]["merges"][1] = "abc"; }), HasSubstr("merges[1]"));
  EXPECT_THAT(with([](auto& f) { f["model"]["merges"][1] = "a b c"; }), HasSubstr("merges[1]"));
  EXPECT_THAT(with([](auto& f) { f["model"]["merges"][1] = {"ab"}; }), HasSubstr("merges[1]"));
  EXPECT_THAT(with([](auto& f) { f["model"]["merges"][1] = {"a", "b", "c"}; }), HasSubstr("merges[1]"));
  EXPECT_THAT(with([](auto& f) { f["model"]["merges"][1] = 7; }), HasSubstr("expected strings"));
  EXPECT_THAT(with([](auto& f) { f["model"]["merges"][1] = "ab q"; }), HasSubstr("\"abq\" is not in vocab"));
  EXPECT_THAT(with([](auto& f) { f["added_tokens"][0].erase("id"); }), HasSubstr("added_tokens[0]"));
  EXPECT_THAT(error_of(small_file(), R"({"added_tokens_decoder": {"258": {"content": "<z>"}}})"),
              HasSubstr("disagree on token 258"));
  EXPECT_THAT(error_of(small_file(), R"({"added_tokens_decoder": {"259": {"content": "<x>"}}})"),
              HasSubstr("258 and 259"));
  EXPECT_THAT(error_of(small_file(), R"({"added_tokens_decoder": {"x": {"content": "<z>"}}})"),
              HasSubstr("added_tokens_decoder.x"));
  EXPECT_THAT(error_of(small_file(), "["), HasSubstr("tokenizer_config.json"));
}

TEST(TokenizerFile, TruncationAtAnyPlaceIsAnError) {
  const std::string json = small_file().dump();
  for (size_t n = 0; n < json.size(); n += 7)
    EXPECT_THROW(parse_tokenizer(std::string_view(json).substr(0, n), ""), Error) << n;
}

TEST(TokenizerFile, DeepNestingAndHugeFilesAreHarmless) {
  EXPECT_THROW(parse_tokenizer(std::string(1 << 20, '['), ""), Error);
  EXPECT_THROW(parse_tokenizer(std::string(kMaxTokenizerBytes + 1, ' '), ""), Error);
}

TEST(TokenizerFile, AMissingFileIsNamed) {
  try {
    Tokenizer::load("models/no-such-model");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.fault(), Fault::model);
    EXPECT_THAT(error.what(), HasSubstr("models/no-such-model/tokenizer.json"));
  }
}

TEST(TokenizerFile, WhatIsNoFileIsNotWaitedFor) {
  const auto dir = std::filesystem::temp_directory_path() / "lily_tokenizer_device";
  std::filesystem::remove_all(dir);
  std::filesystem::create_directory(dir);
  std::filesystem::create_symlink("/dev/zero", dir / "tokenizer.json");
  try {
    Tokenizer::load(dir.string());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.fault(), Fault::model);
    EXPECT_THAT(error.what(), HasSubstr("tokenizer.json: is not a regular file"));
  }
  std::filesystem::remove_all(dir);
}

TEST(TokenizerFile, LoadsWithoutConfigVocabJsonAndMergesTxt) {
  const auto dir = std::filesystem::temp_directory_path() / "lily_tokenizer_only";
  std::filesystem::create_directories(dir);
  std::filesystem::copy_file("models/lily-tiny/tokenizer.json", dir / "tokenizer.json",
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_EQ(Tokenizer::load(dir.string()).id_of("<|im_end|>"), 8130);
  std::filesystem::remove_all(dir);
}

}  // namespace
}  // namespace lily::text
