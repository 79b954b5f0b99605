// Each allocation failing in turn while a model is loaded, a prompt is read, tokens are written and a session
// is saved, with the cpu backend and a small model: a clear error, no wrong output, and what is left is
// usable.
//
// There are thousands of allocations, so a run tries some of them, others each time; --every tries all.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <functional>
#include <random>

#include "base/error.h"
#include "base/terminate.h"
#include "engine/disk_cache.h"
#include "engine/engine.h"
#include "engine/load.h"
#include "model/checkpoint.h"
#include "tests/engine/faults.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/temp_folder.h"

namespace lily::engine {
namespace {

using test::Allocations;
using test::Exempt;

bool& tries_every() {
  static bool value = false;
  return value;
}

constexpr int kTries = 120;       // of each phase, unless all are tried
constexpr int kTriesOnDisk = 30;  // each waits for the disk a few times
constexpr int kContext = 256, kAnswer = 6;

// Calls `attempt` with the number of the allocation that is to fail, until there are no more. It says how
// many there were.
void with_each_failing(const char* phase, const std::function<Allocations(int64_t)>& attempt,
                       int n_tries = kTries) {
  const int64_t n = attempt(-1).n;
  ASSERT_GT(n, 0) << phase;
  std::vector<int64_t> places;
  if (tries_every() || n <= n_tries) {
    for (int64_t i = 0; i < n; ++i) places.push_back(i);
  } else {
    std::mt19937_64 random(std::random_device{}());
    // The first and the last allocations in every run, and one of each stretch between.
    const int64_t n_ends = n_tries / 6;
    for (int64_t i = 0; i < n_ends; ++i) places.insert(places.end(), {i, n - 1 - i});
    const int64_t stride = std::max<int64_t>(1, (n - 2 * n_ends) / (n_tries - 2 * n_ends));
    for (int64_t i = n_ends; i < n - n_ends; i += stride)
      places.push_back(i + static_cast<int64_t>(random() % static_cast<uint64_t>(stride)));
  }
  int n_failed = 0;
  for (const int64_t place : places) {
    SCOPED_TRACE(testing::Message() << phase << ", allocation " << place << " of " << n);
    n_failed += attempt(place).failed ? 1 : 0;
    if (testing::Test::HasFailure()) return;
  }
  std::printf("%s: %d of %lld allocations failed\n", phase, n_failed, static_cast<long long>(n));
  EXPECT_GT(n_failed, std::ssize(places) / 2);
}

class Faults : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new test::TempFolder;
    test::CheckpointWriter({}).write(folder_->path() / "model");
  }
  static void TearDownTestSuite() { delete folder_; }

  // Steps allocate nothing on other threads than the engine's; loading does.
  static LoadOptions load_options(int n_threads = 1) {
    LoadOptions load{.backend = "cpu", .threads = n_threads, .kv = plan::KvType::f32};
    load.memory.context = kContext;
    load.memory.n_cached_states = 4;
    return load;
  }
  static std::string model_folder() { return (folder_->path() / "model").string(); }
  static model::Checkpoint checkpoint() { return model::Checkpoint::open(model_folder()); }
  static int32_t n_tokens() { return test::small_dims().vocab; }

  static GenerateRequest request(int n_prompt = 100, int n_answer = kAnswer) {
    GenerateRequest r{.max_tokens = n_answer};
    for (int i = 0; i < n_prompt; ++i) r.prompt.push_back((i * 37 + i / 7) % n_tokens());
    r.sampling.temperature = 0;
    return r;
  }

  struct Loaded {
    Allocations allocations;
    std::string error;
  };
  static Loaded load_with(int64_t failing) {
    Loaded loaded;
    test::fail_allocation(failing);
    try {
      const model::Checkpoint opened = checkpoint();
      LoadedModel model(opened, n_tokens(), load_options(2));
      model.load();
      const Engine engine(model.make_executor());
    } catch (const std::exception& e) {
      const Exempt exempt;
      loaded.error = e.what();
    }
    loaded.allocations = test::stop_failing();
    return loaded;
  }

  // What a failed allocation may be called.
  static bool is_clear(const std::string& error) {
    for (const char* words : {"memory", "bad_alloc"})
      if (error.find(words) != std::string::npos) return true;
    return false;
  }

  // The answer's tokens; `error` is set where it failed. Nothing that is read here fails, what writes it may.
  static std::vector<int32_t> read(Generation& generation, std::string& error) {
    const Exempt exempt;
    std::vector<int32_t> ids;
    while (auto event = generation.next()) {
      if (const auto* token = std::get_if<Token>(&*event)) ids.push_back(token->id);
      if (const auto* end = std::get_if<Finished>(&*event); end != nullptr && end->finish == Finish::error)
        error = end->error.empty() ? "no message" : end->error;
    }
    return ids;
  }
  static std::vector<int32_t> ask(Engine& engine, GenerateRequest r, std::string& error) {
    try {
      Generation generation = engine.generate(std::move(r));
      return read(generation, error);
    } catch (const std::exception& e) {
      const Exempt exempt;
      error = e.what();
      return {};
    }
  }
  static std::vector<int32_t> expected(Engine& engine, const GenerateRequest& r) {
    std::string error;
    GenerateRequest copy{.prompt = r.prompt, .sampling = r.sampling, .max_tokens = r.max_tokens};
    const std::vector<int32_t> ids = ask(engine, std::move(copy), error);
    EXPECT_EQ(error, "");
    return ids;
  }
  // Either all of the answer or an error, after which it is a beginning of the answer.
  static void expect_right(const std::vector<int32_t>& ids, const std::string& error,
                           const std::vector<int32_t>& right) {
    if (error.empty()) {
      EXPECT_EQ(ids, right);
      return;
    }
    EXPECT_TRUE(is_clear(error)) << error;
    ASSERT_LE(ids.size(), right.size());
    EXPECT_TRUE(std::equal(ids.begin(), ids.end(), right.begin())) << "a wrong token before the error";
  }

  static test::TempFolder* folder_;
};

test::TempFolder* Faults::folder_ = nullptr;

// Exit codes of a process that loads.
constexpr int kEndedCleanly = 1, kFailed = 10, kDidNotFail = 11, kUnclear = 12;

TEST_F(Faults, WhileLoading) {
  // In a process of its own: the destructors of a library take memory too, and there the program may only
  // end.
  with_each_failing("load", [&](int64_t place) -> Allocations {
    if (place < 0) return load_with(place).allocations;
    std::fflush(nullptr);
    const pid_t child = ::fork();
    if (child == 0) {
      end_cleanly_without_memory();
      const Loaded loaded = load_with(place);
      if (!loaded.error.empty() && !is_clear(loaded.error)) std::_Exit(kUnclear);
      std::_Exit(loaded.allocations.failed ? kFailed : kDidNotFail);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    EXPECT_TRUE(code == kFailed || code == kDidNotFail || code == kEndedCleanly) << "exit code " << code;
    return {.failed = code != kDidNotFail};
  });
  // After all that a model can still be loaded and answers.
  const model::Checkpoint opened = checkpoint();
  LoadedModel model(opened, n_tokens(), load_options());
  model.load();
  Engine engine(model.make_executor());
  EXPECT_EQ(expected(engine, request()).size(), static_cast<size_t>(kAnswer));
}

class LoadedFaults : public Faults {
 protected:
  LoadedFaults() : checkpoint_(checkpoint()), model_(checkpoint_, n_tokens(), load_options()) {
    model_.load();
    Engine engine(model_.make_executor());
    right_ = expected(engine, request());
  }

  const model::Checkpoint checkpoint_;
  LoadedModel model_;
  std::vector<int32_t> right_;
};

// With an engine of its own each time, so that steps are compiled too.
TEST_F(LoadedFaults, WhileAPromptIsRead) {
  with_each_failing("prefill", [&](int64_t place) {
    Engine engine(model_.make_executor());
    GenerateRequest asked = request();
    asked.max_tokens = 1;
    std::string error;
    test::fail_allocation(place);
    const std::vector<int32_t> ids = ask(engine, std::move(asked), error);
    const Allocations allocations = test::stop_failing();
    expect_right(ids, error, {right_.begin(), right_.begin() + 1});
    EXPECT_EQ(expected(engine, request()), right_) << "the same engine afterwards";
    return allocations;
  });
}

TEST_F(LoadedFaults, WhileTokensAreWritten) {
  const auto allocations_of = [&](int n_answer, int64_t failing, std::vector<int32_t>& ids,
                                  std::string& error, Engine& engine) {
    GenerateRequest asked = request();
    asked.max_tokens = n_answer;
    test::fail_allocation(failing);
    ids = ask(engine, std::move(asked), error);
    return test::stop_failing();
  };
  std::vector<int32_t> ids;
  std::string error;
  // What comes before the second token is the prompt's.
  int64_t n_of_prompt = 0;
  {
    Engine engine(model_.make_executor());
    n_of_prompt = allocations_of(1, -1, ids, error, engine).n;
  }
  with_each_failing("decode", [&](int64_t place) {
    Engine engine(model_.make_executor());
    error.clear();
    Allocations allocations =
        allocations_of(kAnswer, place < 0 ? -1 : n_of_prompt + place, ids, error, engine);
    expect_right(ids, error, right_);
    EXPECT_EQ(expected(engine, request()), right_) << "the same engine afterwards";
    allocations.n -= n_of_prompt;
    return allocations;
  });
}

TEST_F(LoadedFaults, WhileASessionIsSaved) {
  with_each_failing("save", [&](int64_t place) {
    const test::TempFolder folder;
    const std::filesystem::path file = folder.path() / "session.lily";
    SessionHeader header{.kind = SessionKind::chat, .identity = std::string(64, '1'), .messages = "[]"};
    Engine engine(model_.make_executor());
    const GenerateRequest asked = request();
    EXPECT_EQ(expected(engine, asked), right_);
    std::string error;
    test::fail_allocation(place);
    try {
      engine.save_session(asked.prompt, file, std::move(header));
    } catch (const std::exception& e) {
      const Exempt exempt;
      error = e.what();
    }
    const Allocations allocations = test::stop_failing();
    EXPECT_EQ(expected(engine, asked), right_) << "the same engine afterwards";
    if (!error.empty()) {
      EXPECT_TRUE(is_clear(error)) << error;
    } else {  // it is whole, and the state in it is right
      engine.clear_cache();
      SessionReader reader(file);
      EXPECT_TRUE(engine.load_session(reader));
      EXPECT_EQ(expected(engine, asked), right_);
    }
    return allocations;
  });
}

TEST_F(LoadedFaults, WhileTheDiskCacheIsWritten) {
  with_each_failing(
      "disk cache",
      [&](int64_t place) {
        const test::TempFolder folder;
        const DiskCacheOptions options{.folder = folder.path(),
                                       .identity = std::string(64, '1'),
                                       .save_after = std::chrono::milliseconds(0)};
        {
          DiskCache disk(options);
          Engine engine(model_.make_executor(), {}, &disk);
          GenerateRequest asked = request();
          asked.n_stable = 90;
          std::string error;
          test::fail_allocation(place);
          const std::vector<int32_t> ids = ask(engine, std::move(asked), error);
          if (error.empty()) EXPECT_EQ(ids, right_);
          else EXPECT_TRUE(is_clear(error)) << error;
        }  // what is left is saved
        const Allocations allocations = test::stop_failing();
        DiskCacheOptions again = options;
        again.save_after = std::chrono::hours(1);
        DiskCache disk(again);
        Engine engine(model_.make_executor(), {}, &disk);
        EXPECT_EQ(expected(engine, request()), right_) << "after a restart";
        EXPECT_EQ(disk.stats().n_ignored, 0) << "a file with a name is whole";
        return allocations;
      },
      kTriesOnDisk);
}

}  // namespace
}  // namespace lily::engine

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  lily::engine::tries_every() = argc > 1 && std::string_view(argv[1]) == "--every";
  return RUN_ALL_TESTS();
}
