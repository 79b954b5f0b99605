// kill -9 at random moments while the disk cache is written: the next start works, and every answer after it
// is the one of a machine that has forgotten everything.
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <random>
#include <thread>

#include "engine/disk_cache.h"
#include "engine/engine.h"
#include "tests/engine/scripted_executor.h"
#include "tests/support/temp_folder.h"

extern char** environ;

namespace lily::engine {
namespace {

namespace fs = std::filesystem;
using test::TempFolder;

constexpr const char* kWriterFlag = "--write-until-killed";
// Long enough that most kills hit a write: 64 kB of state a snapshot.
Limits limits() {
  Limits l = ScriptedExecutor::pipelined();
  l.max_context = 16384;
  l.n_kv_blocks = 1024;
  return l;
}

DiskCacheOptions options_of(const fs::path& folder) {
  return {.folder = folder,
          .max_bytes = 4 << 20,
          .identity = std::string(64, '1'),
          .save_after = std::chrono::milliseconds(0)};
}

// Prompt number n of a conversation: it begins as all earlier ones.
std::vector<int32_t> prompt_of(uint32_t conversation, int n) {
  std::mt19937 random(conversation);
  std::vector<int32_t> tokens;
  for (int i = 0; i < 200 + 90 * n; ++i) tokens.push_back(static_cast<int32_t>(random() % 100));
  return tokens;
}

std::vector<int32_t> ask(Engine& engine, std::vector<int32_t> prompt, Usage* usage = nullptr) {
  const auto n_stable = static_cast<int32_t>(prompt.size()) - 3;
  Generation g = engine.generate(
      {.prompt = std::move(prompt), .n_stable = n_stable, .sampling = {.temperature = 0}, .max_tokens = 3});
  std::vector<int32_t> answer;
  while (auto event = g.next()) {
    if (const auto* token = std::get_if<Token>(&*event)) answer.push_back(token->id);
    if (const auto* end = std::get_if<Finished>(&*event); end != nullptr && usage != nullptr)
      *usage = end->usage;
  }
  return answer;
}

std::vector<int32_t> expected(std::vector<int32_t> prompt) {
  std::vector<int32_t> answer;
  for (int i = 0; i < 3; ++i) {
    std::vector<float> logits = logits_of(prompt, limits().vocab);
    logits.resize(static_cast<size_t>(limits().n_tokens));
    answer.push_back(plan::greedy_token(logits));
    prompt.push_back(answer.back());
  }
  return answer;
}

std::string& program_path() {
  static std::string path;
  return path;
}

// The child: talks, and saves every state as soon as it can. Says on stdout when it begins.
[[noreturn]] void write_until_killed(const char* folder, uint32_t seed) {
  DiskCache disk(options_of(folder));
  Engine engine(std::make_unique<ScriptedExecutor>(limits()), {}, &disk);
  std::mt19937 random(seed);
  if (::write(STDOUT_FILENO, "!", 1) != 1) std::_Exit(3);
  for (;;) {
    const uint32_t conversation = random() % 7;
    const std::vector<int32_t> prompt = prompt_of(conversation, static_cast<int>(random() % 10));
    if (ask(engine, prompt) != expected(prompt)) std::_Exit(2);
  }
}

class KilledWriter : public ::testing::Test {
 protected:
  // Kills the child after a random time from its first word; how it ended.
  void run_and_kill(uint32_t seed, int after_us) {
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    const std::string program = program_path(), seed_text = std::to_string(seed);
    const std::string folder = folder_.path().string();
    const char* const arguments[] = {program.c_str(), kWriterFlag, folder.c_str(), seed_text.c_str(),
                                     nullptr};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_addclose(&actions, ends[0]);
    pid_t pid = 0;
    ASSERT_EQ(posix_spawn(&pid, program.c_str(), &actions, nullptr, const_cast<char**>(arguments), environ),
              0);
    posix_spawn_file_actions_destroy(&actions);
    ::close(ends[1]);
    char word = 0;
    EXPECT_EQ(::read(ends[0], &word, 1), 1) << "the next start did not work";
    ::close(ends[0]);
    std::this_thread::sleep_for(std::chrono::microseconds(after_us));
    ::kill(pid, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(pid, &status, 0), pid);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
        << "the child ended by itself: " << status;
  }

  // Every conversation, answered with what the dead have left.
  void expect_right_answers() {
    DiskCacheOptions options = options_of(folder_.path());
    options.save_after = std::chrono::hours(1);
    DiskCache disk(options);
    Engine engine(std::make_unique<ScriptedExecutor>(limits()), {}, &disk);
    for (uint32_t conversation = 0; conversation < 7; ++conversation) {
      const std::vector<int32_t> prompt = prompt_of(conversation, 9);
      Usage usage;
      EXPECT_EQ(ask(engine, prompt, &usage), expected(prompt)) << "conversation " << conversation;
      n_from_disk_ += usage.from_disk ? 1 : 0;
    }
    // All files that have a name are whole: a name is given last.
    EXPECT_EQ(disk.stats().n_ignored, 0);
    n_files_ = disk.stats().n_files;
    for (const auto& entry : fs::directory_iterator(folder_.path()))
      n_left_over_ += entry.path().filename().string().starts_with('.') ? 1 : 0;
  }

  // Until so many kills have come during a write; answers are checked after every tenth kill.
  void kill_during_writes(int n_writes, uint32_t seed) {
    std::mt19937 random(seed);
    const int most_kills = 40 * n_writes;
    int n_kills = 0, n_interrupted = 0;
    while (n_interrupted < n_writes && n_kills < most_kills) {
      run_and_kill(static_cast<uint32_t>(random()), static_cast<int>(random() % 20'000));
      if (HasFailure()) return;
      for (const auto& entry : fs::directory_iterator(folder_.path()))
        n_interrupted += entry.path().filename().string().starts_with('.') ? 1 : 0;
      if (++n_kills % 10 == 0 || n_interrupted >= n_writes) expect_right_answers();
    }
    std::printf("%d kills, %d of them during a write; %lld files, %d states brought back\n", n_kills,
                n_interrupted, static_cast<long long>(n_files_), n_from_disk_);
    EXPECT_GE(n_interrupted, n_writes) << "too few kills came during a write";
    EXPECT_GT(n_from_disk_, 0) << "nothing was brought back";
    EXPECT_EQ(n_left_over_, 0) << "half files stay";
  }

  TempFolder folder_;
  int n_from_disk_ = 0, n_left_over_ = 0;
  int64_t n_files_ = 0;
};

TEST_F(KilledWriter, LeavesNothingWrongAfterAFewKills) { kill_during_writes(5, 1); }

TEST_F(KilledWriter, LeavesNothingWrongAfterTwoHundredKilledWrites) { kill_during_writes(200, 2); }

}  // namespace
}  // namespace lily::engine

int main(int argc, char** argv) {
  if (argc == 4 && std::string_view(argv[1]) == lily::engine::kWriterFlag)
    lily::engine::write_until_killed(argv[2], static_cast<uint32_t>(std::stoul(argv[3])));
  lily::engine::program_path() = std::filesystem::absolute(argv[0]).string();
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
