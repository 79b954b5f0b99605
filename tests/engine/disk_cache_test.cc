// The disk cache with an engine whose executor checks every state it is given.
#include "engine/disk_cache.h"

#include <gtest/gtest.h>

#include <thread>

#include "base/log.h"
#include "engine/engine.h"
#include "tests/engine/scripted_executor.h"
#include "tests/support/error_of.h"
#include "tests/support/temp_folder.h"

namespace lily::engine {
namespace {

using test::TempFolder;
namespace fs = std::filesystem;

const std::string kIdentity(64, '1');

DiskCacheOptions options_of(const TempFolder& folder, int64_t max_bytes = 1 << 20) {
  return {.folder = folder.path() / "cache",
          .max_bytes = max_bytes,
          .identity = kIdentity,
          .save_after = std::chrono::milliseconds(0)};
}

std::vector<int32_t> tokens_from(int32_t first, int n) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < n; ++i) tokens.push_back((first + i * 7) % 100);
  return tokens;
}

struct Answered {
  std::vector<int32_t> tokens;
  Finished end;
};

// One process of the server: a machine, an engine and the cache on disk.
struct Process {
  explicit Process(const DiskCacheOptions& options, const Limits& limits = ScriptedExecutor::pipelined())
      : disk(options),
        engine(std::make_unique<Engine>(std::make_unique<ScriptedExecutor>(limits), EngineOptions{}, &disk)) {
  }
  DiskCache disk;
  std::unique_ptr<Engine> engine;

  Answered ask(std::vector<int32_t> prompt, int n = 5, int32_t n_stable = 0) {
    Generation g = engine->generate(
        {.prompt = std::move(prompt), .n_stable = n_stable, .sampling = {.temperature = 0}, .max_tokens = n});
    Answered answered;
    while (auto event = g.next()) {
      if (const auto* token = std::get_if<Token>(&*event)) answered.tokens.push_back(token->id);
      if (auto* end = std::get_if<Finished>(&*event)) answered.end = std::move(*end);
    }
    return answered;
  }
};

std::vector<int32_t> expected_answer(std::vector<int32_t> prompt, int n) {
  std::vector<int32_t> answer;
  for (int i = 0; i < n; ++i) {
    std::vector<float> logits = logits_of(prompt, ScriptedExecutor::small().vocab);
    logits.resize(static_cast<size_t>(ScriptedExecutor::small().n_tokens));
    answer.push_back(plan::greedy_token(logits));
    prompt.push_back(answer.back());
  }
  return answer;
}

// What the next turn's prompt is: all that was read and written, and more.
std::vector<int32_t> next_prompt(std::vector<int32_t> prompt, const Answered& answered, int n_more) {
  prompt.insert(prompt.end(), answered.tokens.begin(), answered.tokens.end());
  for (const int32_t token : tokens_from(static_cast<int32_t>(prompt.size()), n_more))
    prompt.push_back(token);
  return prompt;
}

class WarningCount {
 public:
  WarningCount() {
    set_log_sink([this](LogLevel level, std::string_view line) {
      if (level < LogLevel::notice) return;
      const std::lock_guard lock(mutex_);
      EXPECT_EQ(line.find('\n'), std::string_view::npos) << line;
      lines_.emplace_back(line);
    });
  }
  ~WarningCount() { set_log_sink({}); }
  std::vector<std::string> lines() {
    const std::lock_guard lock(mutex_);
    return lines_;
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

std::vector<fs::path> files_in(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

TEST(DiskCache, AConversationGoesOnInTheNextProcess) {
  const TempFolder folder;
  std::vector<int32_t> prompt = tokens_from(3, 100);
  for (int turn = 0; turn < 6; ++turn) {
    Process process(options_of(folder));
    const Answered answered = process.ask(prompt);
    EXPECT_EQ(answered.tokens, expected_answer(prompt, 5)) << "turn " << turn;
    if (turn > 0) {
      EXPECT_EQ(answered.end.usage.cached_tokens, static_cast<int32_t>(prompt.size()) - 20 - 1);
      EXPECT_TRUE(answered.end.usage.from_disk);
      EXPECT_EQ(process.engine->stats().cache_disk_hits, 1);
    }
    prompt = next_prompt(prompt, answered, 20);
  }
}

TEST(DiskCache, SavesWhileNothingRuns) {
  const TempFolder folder;
  Process process(options_of(folder));
  process.ask(tokens_from(3, 100));
  for (int i = 0; i < 1000 && process.disk.stats().n_written < 1; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_GE(process.disk.stats().n_written, 1);
}

TEST(DiskCache, SavesOnlyWhatIsStillThereAfterAWhile) {
  const TempFolder folder;
  DiskCacheOptions options = options_of(folder);
  options.save_after = std::chrono::hours(1);
  Process process(options);
  std::vector<int32_t> prompt = tokens_from(3, 100);
  for (int turn = 0; turn < 5; ++turn) prompt = next_prompt(prompt, process.ask(prompt), 20);
  process.disk.flush();
  EXPECT_EQ(process.disk.stats().n_written, 0);
  process.engine.reset();  // the end is no reason to forget
  process.disk.flush();
  EXPECT_EQ(process.disk.stats().n_written, 1) << "each turn's state goes on from that of the turn before";
}

TEST(DiskCache, TwoProcessesShareAFolder) {
  const TempFolder folder;
  Process a(options_of(folder)), b(options_of(folder));
  const std::vector<int32_t> prompt = tokens_from(3, 100);
  const Answered first = a.ask(prompt);
  a.engine.reset();
  a.disk.flush();
  const std::vector<int32_t> next = next_prompt(prompt, first, 20);
  const Answered second = b.ask(next);
  EXPECT_TRUE(second.end.usage.from_disk);
  EXPECT_EQ(second.tokens, expected_answer(next, 5));
}

TEST(DiskCache, ADamagedFileIsOneLineAndNeverTrusted) {
  const TempFolder folder;
  const std::vector<int32_t> prompt = tokens_from(3, 100);
  std::vector<int32_t> next;
  {
    Process process(options_of(folder));
    next = next_prompt(prompt, process.ask(prompt), 20);
  }
  const std::vector<fs::path> files = files_in(folder.path() / "cache");
  ASSERT_EQ(files.size(), 1u);
  const std::string whole = test::read_file(files[0]);
  // In the header, in the state and in the KV; cut off; empty; another identity's under this name.
  std::vector<std::string> damaged;
  for (const size_t at : {size_t{20}, size_t{300}, whole.size() - 600, whole.size() - 20}) {
    damaged.push_back(whole);
    damaged.back()[at] ^= 4;
  }
  damaged.push_back(whole.substr(0, whole.size() / 2));
  damaged.emplace_back();
  SessionHeader foreign{.identity = std::string(64, '2'), .tokens = tokens_from(3, 100)};
  damaged.push_back(encode_header(foreign));
  foreign.identity = kIdentity;
  damaged.push_back(encode_header(foreign));  // other tokens than the name says, and no state
  for (size_t i = 0; i < damaged.size(); ++i) {
    test::write_file(files[0], damaged[i]);
    WarningCount warnings;
    DiskCacheOptions options = options_of(folder);
    options.save_after = std::chrono::hours(1);
    Process process(options);
    for (int again = 0; again < 2; ++again) {
      const Answered answered = process.ask(next);
      EXPECT_EQ(answered.tokens, expected_answer(next, 5)) << "damage " << i;
      EXPECT_FALSE(answered.end.usage.from_disk) << "damage " << i;
    }
    EXPECT_EQ(process.disk.stats().n_ignored, 1) << "damage " << i;
    ASSERT_EQ(warnings.lines().size(), 1u) << "damage " << i;
    EXPECT_NE(warnings.lines()[0].find(files[0].filename().string()), std::string::npos);
    process.engine.reset();
    process.disk.clear();
    test::write_file(files[0], whole);
  }
}

TEST(DiskCache, FilesOfOthersAreNotTouchedButCount) {
  const TempFolder folder;
  fs::create_directories(folder.path() / "cache");
  test::write_file(folder.path() / "cache/notes.txt", std::string(100'000, 'x'));
  const fs::path other =
      folder.path() / "cache" / ("2222222222222222-t100-" + std::string(16, '0') + ".lily");
  test::write_file(other, std::string(30'000, 'x'));
  fs::last_write_time(other, fs::file_time_type::clock::now() - std::chrono::hours(100));
  DiskCacheOptions options = options_of(folder, 25'000);
  const std::vector<int32_t> prompt = tokens_from(3, 100);
  {
    Process process(options);
    process.ask(prompt);
  }
  EXPECT_TRUE(fs::exists(folder.path() / "cache/notes.txt"));
  EXPECT_FALSE(fs::exists(other)) << "the oldest goes first, whosever it is";
}

int64_t bytes_in(const fs::path& folder) {
  int64_t n_bytes = 0;
  std::error_code gone;
  for (const fs::path& file : files_in(folder)) {
    const auto n = fs::file_size(file, gone);
    if (!gone) n_bytes += static_cast<int64_t>(n);
  }
  return n_bytes;
}

TEST(DiskCache, AFolderThatMayBeSmallerThanTheLastTimeIsCutAtTheStart) {
  const TempFolder folder;
  const DiskCacheOptions large = options_of(folder, 20'000);
  {
    Process process(large);
    for (int i = 0; i < 10; ++i) process.ask(tokens_from(i, 100 + i));
    process.engine.reset();
    process.disk.flush();
  }
  EXPECT_GT(bytes_in(large.folder), 8'000);
  for (const int64_t most : {8'000, 1}) {
    const DiskCache disk(options_of(folder, most));
    EXPECT_LE(bytes_in(large.folder), most);
  }
}

TEST(DiskCache, StaysBelowItsSize) {
  const TempFolder folder;
  const DiskCacheOptions options = options_of(folder, 20'000);
  Process process(options);
  for (int i = 0; i < 40; ++i) {
    process.ask(tokens_from(i, 100 + i));
    process.disk.flush();
    EXPECT_LE(bytes_in(options.folder), options.max_bytes);
  }
  process.engine.reset();
  process.disk.flush();
  EXPECT_GT(process.disk.stats().n_files, 2);
}

TEST(DiskCache, OneThatIsLargerThanTheCacheIsNotSaved) {
  const TempFolder folder;
  WarningCount warnings;
  Process process(options_of(folder, 1000));
  process.ask(tokens_from(3, 100));
  process.engine.reset();
  process.disk.flush();
  EXPECT_EQ(process.disk.stats().n_files, 0);
  EXPECT_EQ(warnings.lines().size(), 1u);
}

TEST(DiskCache, AFolderThatCannotBeWrittenIsALineAndNoFailure) {
  const TempFolder folder;
  WarningCount warnings;
  Process process(options_of(folder));
  fs::remove_all(folder.path() / "cache");
  for (int i = 0; i < 3; ++i) {
    const Answered answered = process.ask(tokens_from(i, 100));
    EXPECT_EQ(answered.tokens, expected_answer(tokens_from(i, 100), 5));
  }
  process.engine.reset();
  process.disk.flush();
  EXPECT_EQ(process.disk.stats().n_failed, 3);
  EXPECT_EQ(warnings.lines().size(), 1u) << "a disk that fails is told once";
}

TEST(DiskCache, ReplayedAnswersAreFoundByTheirConversation) {
  const TempFolder folder;
  const std::string a(64, 'a'), b = std::string(16, 'a') + std::string(48, 'b');
  {
    DiskCache disk(options_of(folder));
    disk.keep(a, {1, 2, 3});
    disk.keep(b, {4});
  }
  DiskCache disk(options_of(folder));
  EXPECT_EQ(disk.find(a), (std::vector<int32_t>{1, 2, 3}));
  EXPECT_EQ(disk.find(b), (std::vector<int32_t>{4}));
  EXPECT_EQ(disk.find(std::string(64, 'c')), std::nullopt);
}

TEST(DiskCache, ReplayedAnswersHaveAShareOfTheFolder) {
  const TempFolder folder;
  DiskCache disk(options_of(folder, 160'000));
  for (int i = 0; i < 30; ++i) disk.keep(fmt::format("{:064x}", i), std::vector<int32_t>(500, i));
  disk.flush();
  EXPECT_LE(disk.stats().n_bytes, 10'000);
  EXPECT_GE(disk.stats().n_files, 3);
}

TEST(DiskCache, ClearingTheCacheEmptiesTheFolder) {
  const TempFolder folder;
  Process process(options_of(folder));
  process.ask(tokens_from(3, 100));
  process.engine->clear_cache();
  process.engine.reset();
  process.disk.flush();
  EXPECT_TRUE(files_in(folder.path() / "cache").empty());
}

TEST(DiskCache, AFolderThatIsAFileIsRefused) {
  const TempFolder folder;
  test::write_file(folder.path() / "cache", "");
  EXPECT_NE(test::error_of([&] { DiskCache disk(options_of(folder)); }).find("--cache-dir"),
            std::string::npos);
}

// A machine with so little memory that every state that is brought back or copied is in somebody's way.
TEST(DiskCache, SavingGivesWayWhereMemoryIsShort) {
  const TempFolder folder;
  Limits limits = ScriptedExecutor::pipelined();
  limits.n_state_slots = 4;
  limits.n_kv_blocks = 9;
  Process process(options_of(folder), limits);
  std::vector<std::vector<int32_t>> prompts;
  for (int i = 0; i < 3; ++i) prompts.push_back(tokens_from(i, 100));
  for (int turn = 0; turn < 5; ++turn)
    for (auto& prompt : prompts) {
      const Answered answered = process.ask(prompt);
      ASSERT_EQ(answered.tokens, expected_answer(prompt, 5));
      prompt = next_prompt(prompt, answered, 20);
    }
}

TEST(DiskCache, ASessionFileIsWrittenAndTakenUpAgain) {
  const TempFolder folder;
  const fs::path path = folder.path() / "chat.lily";
  const std::vector<int32_t> prompt = tokens_from(3, 100);
  std::vector<int32_t> next;
  {
    Engine engine(std::make_unique<ScriptedExecutor>(ScriptedExecutor::pipelined()));
    Generation g = engine.generate({.prompt = prompt, .sampling = {.temperature = 0}, .max_tokens = 5});
    Answered answered;
    while (auto event = g.next())
      if (const auto* token = std::get_if<Token>(&*event)) answered.tokens.push_back(token->id);
    next = next_prompt(prompt, answered, 20);
    EXPECT_TRUE(engine.save_session(next, path,
                                    {.kind = SessionKind::chat, .identity = kIdentity, .messages = "[]"}));
    EXPECT_FALSE(engine.save_session(tokens_from(50, 80), path, {.identity = kIdentity}));
  }
  Engine engine(std::make_unique<ScriptedExecutor>(ScriptedExecutor::pipelined()));
  SessionReader reader(path);
  EXPECT_EQ(reader.header().messages, "[]");
  EXPECT_TRUE(engine.load_session(reader));
  Generation g = engine.generate({.prompt = next, .sampling = {.temperature = 0}, .max_tokens = 5});
  std::vector<int32_t> tokens;
  while (auto event = g.next()) {
    if (const auto* token = std::get_if<Token>(&*event)) tokens.push_back(token->id);
    if (const auto* end = std::get_if<Finished>(&*event)) EXPECT_EQ(end->usage.cached_tokens, 104);
  }
  EXPECT_EQ(tokens, expected_answer(next, 5));
}

}  // namespace
}  // namespace lily::engine
