// lily pull, list and rm against a hub on loopback, from outside: what arrives, what is said, what is left
// behind.
#include <chrono>
#include <csignal>
#include <fstream>
#include <thread>

#include "hub/cache.h"
#include "hub/pull.h"
#include "tests/hub/rig.h"
#include "tests/support/error_of.h"

namespace lily::test {
namespace {

namespace fs = std::filesystem;

void expect_failure(const Ended& run, const std::string& mentions, int exit_code = 1) {
  EXPECT_EQ(run.exit_code, exit_code) << run.err;
  EXPECT_NE(last_line(run.err).find(mentions), std::string::npos) << run.err;
  EXPECT_EQ(run.err.rfind("lily: ", 0), 0u) << run.err;
  EXPECT_EQ(run.out, "");
}

TEST_F(PullRig, BringsEveryFileThatIsNeededAndNoOther) {
  const Ended run = pull();
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.out, snapshot().string() + "\n");
  expect_whole();
  EXPECT_FALSE(fs::exists(snapshot() / "MODEL_CARD.md"));
  EXPECT_NE(run.err.find("skipped 2 files that lily does not need"), std::string::npos) << run.err;
  EXPECT_EQ(run.err.find('\r'), std::string::npos) << "a bar where there is no terminal";
  EXPECT_EQ(hub.n_sent_of("model.safetensors"), hub.size("model.safetensors"));
}

TEST_F(PullRig, ASecondPullFetchesNothing) {
  ASSERT_EQ(pull().exit_code, 0);
  hub.forget_sent();
  const Ended run = pull();
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(hub.n_sent(), 0u);
  expect_whole();
}

TEST_F(PullRig, GoesWhereTheHubsOtherToolsHaveTheirFiles) {
  const std::string to = home.path().string();
  const std::pair<std::map<std::string, std::string>, std::string> places[] = {
      {{{"XDG_CACHE_HOME", to + "/xdg"}}, to + "/xdg/huggingface/hub"},
      {{{"XDG_CACHE_HOME", to + "/xdg"}, {"HF_HOME", to + "/hf"}}, to + "/hf/hub"},
      {{{"HF_HOME", to + "/hf"}, {"HF_HUB_CACHE", to + "/cache"}}, to + "/cache"}};
  for (const auto& [variables, folder] : places) {
    extra = variables;
    const Ended run = pull();
    EXPECT_EQ(run.exit_code, 0) << run.err;
    EXPECT_EQ(run.out, folder + "/models--lily-models--tiny/snapshots/" + kTestCommit + "\n");
    EXPECT_EQ(lily({"inspect", kTestRepository}).exit_code, 0) << folder;
  }
}

TEST_F(PullRig, APulledModelIsFoundListedAndRemoved) {
  ASSERT_EQ(pull().exit_code, 0);
  const Ended answer =
      lily({"run", "-m", kTestRepository, "--no-think", "-t", "0", "What does the word river mean?"});
  EXPECT_EQ(answer.exit_code, 0) << answer.err;
  EXPECT_EQ(answer.out, "river (noun): a large natural stream of water (larger than a creek)\n");
  EXPECT_EQ(lily({"inspect", kTestRepository}).exit_code, 0);
  const Ended list = lily({"list"});
  EXPECT_NE(list.out.find(kTestRepository), std::string::npos) << list.out << list.err;
  EXPECT_NE(list.out.find("ready"), std::string::npos) << list.out;
  EXPECT_EQ(lily({"rm", kTestRepository}).exit_code, 2) << "nobody was asked";
  EXPECT_TRUE(fs::exists(repository()));
  EXPECT_EQ(lily({"rm", "--yes", kTestRepository}).exit_code, 0);
  EXPECT_FALSE(fs::exists(repository()));
  EXPECT_EQ(lily({"run", "-m", kTestRepository, "Hello"}).exit_code, 2);
}

TEST_F(PullRig, TheTokenGoesToTheHubAndNowhereElse) {
  hub.set({.token = "hf_secret"});
  expect_failure(pull(), "set HF_TOKEN");
  extra["HF_TOKEN"] = "hf_wrong";
  expect_failure(pull(), "with this token");
  extra["HF_TOKEN"] = "hf_secret\n";
  const Ended run = pull({"-v", "-v"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ((run.out + run.err).find("hf_secret"), std::string::npos);
  EXPECT_FALSE(hub.was_token_leaked());
  expect_whole();
}

TEST_F(PullRig, TheTokenFileIsRead) {
  hub.set({.token = "hf_stored"});
  fs::create_directories(home.path() / ".cache/huggingface");
  write_file(home.path() / ".cache/huggingface/token", "hf_stored\n");
  EXPECT_EQ(pull().exit_code, 0);
}

TEST_F(PullRig, ATokenWithALineBreakInsideIsRefused) {
  extra["HF_TOKEN"] = "hf_a\r\nX-Evil: 1";
  expect_failure(pull(), "has a character that no token has", 2);
  EXPECT_EQ(hub.n_requests(), 0);
}

TEST_F(PullRig, RefusalsOfTheHubAreOneClearLine) {
  expect_failure(lily({"pull", "lily-models/huge"}), "is not on http://127.0.0.1");
  expect_failure(pull({"--revision", "v9"}), "has no such revision");
  expect_failure(lily({"pull", "../../etc/passwd"}), "is not the name of a repository", 2);
  expect_failure(pull({"--revision", "../../x"}), "is not the name of a revision", 2);
  hub.set({.token = "hf_secret", .is_gated = true});
  expect_failure(pull(), "is gated or private: accept its terms");
  EXPECT_FALSE(fs::exists(repository()));
}

TEST_F(PullRig, ABusyHubIsAskedAgainWhenItSaysSo) {
  hub.set({.n_busy = 2});
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(pull().exit_code, 0);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
  expect_whole();
}

TEST_F(PullRig, ABrokenHubIsAskedAgain) {
  hub.set({.n_broken = 2});
  EXPECT_EQ(pull().exit_code, 0);
  expect_whole();
}

TEST_F(PullRig, ATransferThatBreaksOffGoesOnWhereItWas) {
  hub.set({.n_cut = 5});
  const Ended run = pull();
  EXPECT_EQ(run.exit_code, 0) << run.err;
  expect_whole();
  EXPECT_EQ(hub.n_sent_of("model.safetensors"), hub.size("model.safetensors"));
}

TEST_F(PullRig, AWrongChecksumIsNeverAWholeFile) {
  hub.set({.corrupt = "model.safetensors", .n_corrupt = 1000});
  expect_failure(pull(), "model.safetensors: the checksum of what arrived is");
  expect_nothing_half();
  EXPECT_FALSE(fs::exists(blob("model.safetensors")));
  EXPECT_FALSE(fs::exists(snapshot() / "config.json"));
  expect_failure(lily({"run", "-m", kTestRepository, "Hello"}), "in part only", 2);
  hub.set({});
  EXPECT_EQ(pull().exit_code, 0);
  expect_whole();
}

TEST_F(PullRig, OneWrongByteIsFetchedOnceMore) {
  hub.set({.corrupt = "model.safetensors", .n_corrupt = 1});
  const Ended run = pull();
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_NE(run.err.find("it is fetched once more"), std::string::npos) << run.err;
  expect_whole();
}

TEST_F(PullRig, SmallFilesAreVerifiedToo) {
  for (const std::string name : {"config.json", "tokenizer.json"}) {
    hub.set({.corrupt = name, .n_corrupt = 1000});
    expect_failure(pull(), name + ": the checksum of what arrived is");
    expect_nothing_half();
  }
}

TEST_F(PullRig, AHubWithoutRangesIsBorne) {
  hub.set({.ignores_ranges = true});
  EXPECT_EQ(pull().exit_code, 0);
  expect_whole();
}

TEST_F(PullRig, OtherBytesThanThoseAskedForAreNotTaken) {
  hub.set({.sends_other_range = true});
  expect_failure(pull({"--retries", "1"}), "the answer has other bytes than those asked for");
  expect_nothing_half();
}

TEST_F(PullRig, ALostNetworkEndsInOneLineAndTheNextPullGoesOn) {
  hub.set({.n_cut = 1'000'000});  // 300,000 bytes and then never more
  // One request at a time: with several, the failure of one drops what is on its way to the others.
  const Ended run = pull({"--retries", "0", "--connections", "1"});
  expect_failure(run, "what has arrived is kept");
  const uint64_t n_before = hub.n_sent_of("model.safetensors");
  EXPECT_GT(n_before, 0u);
  hub.set({});
  EXPECT_EQ(pull().exit_code, 0);
  EXPECT_EQ(hub.n_sent_of("model.safetensors"), hub.size("model.safetensors"));
  expect_whole();
}

TEST_F(PullRig, NoHubAtAll) {
  extra["HF_ENDPOINT"] = "http://127.0.0.1:1";
  expect_failure(pull({"--retries", "1"}), "connect");
  extra["HF_ENDPOINT"] = "file:///etc";
  expect_failure(pull(), "HF_ENDPOINT is file:///etc, which is not an http or https address", 2);
  extra["HF_HUB_OFFLINE"] = "1";
  expect_failure(pull(), "HF_HUB_OFFLINE is set", 2);
}

TEST_F(PullRig, CtrlCStopsAndKeepsWhatArrived) {
  hub.set({.bytes_per_s = 2e6});
  Child child({"pull", kTestRepository, "--piece-bytes", "2000000"}, environment());
  while (hub.n_sent_of("model.safetensors") < 1'000'000)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  child.send(SIGINT);
  EXPECT_EQ(child.wait(), 130);
  EXPECT_NE(last_line(child.err()).find("what has arrived is kept"), std::string::npos) << child.err();
  expect_nothing_half();
  const Ended list = lily({"list"});
  EXPECT_NE(list.out.find("incomplete"), std::string::npos) << list.out << list.err;
  hub.set({});
  EXPECT_EQ(pull().exit_code, 0);
  expect_whole();
  EXPECT_LT(hub.n_sent_of("model.safetensors"), hub.size("model.safetensors") + 1'000'000);
}

TEST_F(PullRig, TwoAtOnceDoNotDisturbEachOther) {
  hub.set({.bytes_per_s = 2e6});
  Child first({"pull", kTestRepository}, environment());
  while (hub.n_sent_of("model.safetensors") < 100'000)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  expect_failure(pull(), "another lily is at work");
  expect_failure(lily({"rm", "--yes", kTestRepository}), "another lily is at work");
  hub.set({});
  EXPECT_EQ(first.wait(), 0);
  expect_whole();
}

TEST_F(PullRig, FilesOfOtherToolsAreUsedAndDamagedOnesReplaced) {
  fs::create_directories(repository() / "blobs");
  fs::copy_file(fs::path(kTinyModel) / "model.safetensors", blob("model.safetensors"));
  std::string tokenizer = read_file(fs::path(kTinyModel) / "tokenizer.json");
  tokenizer[1000] = static_cast<char>(tokenizer[1000] ^ 1);
  write_file(blob("tokenizer.json"), tokenizer);
  const Ended run = pull();
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(hub.n_sent_of("model.safetensors"), 0u);
  EXPECT_EQ(hub.n_sent_of("tokenizer.json"), hub.size("tokenizer.json"));
  EXPECT_NE(run.err.find("tokenizer.json: the copy in the cache is damaged"), std::string::npos) << run.err;
  expect_whole();
}

TEST_F(PullRig, AModelOfAnotherKindIsRefusedBeforeItsWeightsAreFetched) {
  auto config = nlohmann::json::parse(read_file(fs::path(kTinyModel) / "config.json"));
  config["model_type"] = "llama";
  config["text_config"]["model_type"] = "llama";
  hub.add_file("config.json", config.dump());
  expect_failure(pull(), "llama");
  EXPECT_EQ(hub.n_sent_of("model.safetensors"), 0u);
  EXPECT_FALSE(fs::exists(repository()));
}

TEST_F(PullRig, NamesFromTheHubLeadNowhere) {
  hub.set({.edit_listing = [](nlohmann::json& listing) {
    for (const char* name :
         {"../../../../outside", "/tmp/outside", "a/../../model.safetensors", "model\n.safetensors"})
      listing["siblings"].push_back({{"rfilename", name}, {"size", 3}, {"blobId", std::string(40, 'a')}});
  }});
  const Ended run = pull();
  EXPECT_EQ(run.exit_code, 0) << run.err;
  expect_whole();
  hub.set({.edit_listing = [](nlohmann::json& listing) { listing["sha"] = "../../../outside"; }});
  expect_failure(pull(), "is not a description of a repository");
}

TEST_F(PullRig, ARangeThatTheHubRefusesIsOneClearLine) {
  hub.set({.n_cut = 1'000'000});
  pull({"--retries", "0", "--connections", "1"});
  const uint64_t n_before = hub.n_sent_of("model.safetensors");
  hub.set({.refuses_ranges = true});
  expect_failure(pull(), "refuses those from");
  expect_nothing_half();
  hub.set({});
  EXPECT_EQ(pull().exit_code, 0);
  EXPECT_GT(n_before, 0u);
  EXPECT_EQ(hub.n_sent_of("model.safetensors"), hub.size("model.safetensors"));
  expect_whole();
}

// Between two runs the branch moves to a commit with the same weights: they are not fetched again.
TEST_F(PullRig, AnInterruptedPullGoesOnWithANewerCommit) {
  hub.set({.n_cut = 1'000'000});
  pull({"--retries", "0", "--connections", "1"});
  EXPECT_GT(hub.n_sent_of("model.safetensors"), 0u);
  const std::string commit(40, 'b');
  hub.set({});
  hub.set_commit(commit);
  hub.add_file("generation_config.json", R"({"temperature": 0.5})");
  const Ended run = pull();
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(hub.n_sent_of("model.safetensors"), hub.size("model.safetensors"));
  EXPECT_EQ(read_file(repository() / "refs/main"), commit);
  EXPECT_FALSE(fs::exists(snapshot()));
  EXPECT_EQ(read_file(repository() / "snapshots" / commit / "generation_config.json"),
            R"({"temperature": 0.5})");
  EXPECT_EQ(hub::blob_hash_of(std::string(64, '0'),
                              read_file(repository() / "snapshots" / commit / "model.safetensors")),
            hub.blob_id("model.safetensors"));
}

// ... and to one with other weights: nothing of the old ones is mixed in, and nothing of them stays.
TEST_F(PullRig, AnInterruptedPullOfWeightsThatHaveChangedIsDropped) {
  hub.set({.n_cut = 1'000'000});
  pull({"--retries", "0", "--connections", "1"});
  const std::string old_blob = blob("model.safetensors").string(), commit(40, 'b');
  EXPECT_TRUE(fs::exists(old_blob + ".lily-part"));
  std::string weights = read_file(fs::path(kTinyModel) / "model.safetensors");
  weights.back() = static_cast<char>(weights.back() ^ 1);
  hub.add_file("model.safetensors", weights);
  hub.set_commit(commit);
  hub.set({});
  hub.forget_sent();
  const Ended run = pull();
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(hub.n_sent_of("model.safetensors"), weights.size());
  EXPECT_EQ(read_file(repository() / "snapshots" / commit / "model.safetensors"), weights);
  EXPECT_NE(run.err.find("of a download of another revision"), std::string::npos) << run.err;
  for (const auto& entry : fs::directory_iterator(repository() / "blobs"))
    EXPECT_TRUE(hub::is_blob_id(entry.path().filename().string())) << entry.path();
}

// A model that is whole stays in use until the newer one is.
TEST_F(PullRig, AnUpdateThatIsInterruptedLeavesTheOldModelInUse) {
  ASSERT_EQ(pull().exit_code, 0);
  std::string weights = read_file(fs::path(kTinyModel) / "model.safetensors");
  weights.back() = static_cast<char>(weights.back() ^ 1);
  hub.add_file("model.safetensors", weights);
  hub.set_commit(std::string(40, 'b'));
  hub.set({.n_cut = 1'000'000});
  expect_failure(pull({"--retries", "0"}), "what has arrived is kept");
  const Ended list = lily({"list"});
  EXPECT_NE(list.out.find(snapshot().string()), std::string::npos) << list.out;
  EXPECT_EQ(lily({"run", "-m", kTestRepository, "--no-think", "-t", "0", "-n", "3", "Hello"}).exit_code, 0);
  hub.set({});
  EXPECT_EQ(pull().exit_code, 0);
  EXPECT_EQ(read_file(repository() / "refs/main"), std::string(40, 'b'));
}

// Bytes that an earlier run has kept may be wrong, too: then everything is fetched once more.
TEST_F(PullRig, AResumedFileWithAWrongByteIsFetchedOnceMore) {
  hub.set({.n_cut = 1'000'000});
  pull({"--retries", "0", "--connections", "1"});
  std::fstream part(blob("model.safetensors").string() + ".lily-part",
                    std::ios::binary | std::ios::in | std::ios::out);
  part.seekp(1000).put('\x55').put('\x56').put('\x57');
  part.close();
  hub.set({});
  const Ended run = pull();
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_NE(run.err.find("it is fetched once more"), std::string::npos) << run.err;
  expect_whole();
}

TEST_F(PullRig, AFullDiskIsToldBeforehand) {
  const hub::PullOptions options{.repository = kTestRepository,
                                 .address = {.endpoint = hub.endpoint()},
                                 .cache = home.path() / "cache",
                                 .free_bytes = [](const fs::path&) { return uint64_t{1'000'000}; }};
  const hub::PullListener listener{[](const std::string&) {}, [](const hub::PullProgress&) {},
                                   [] { return false; }};
  EXPECT_NE(error_of([&] { hub::pull(options, listener); }).find("make room"), std::string::npos);
  EXPECT_EQ(hub.n_sent_of("model.safetensors"), 0u);
}

}  // namespace
}  // namespace lily::test
