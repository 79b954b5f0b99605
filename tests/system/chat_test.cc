// The interactive chat, and progress, on a pseudo-terminal, as a person uses them.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#ifdef __APPLE__
#include <util.h>
#else
#include <pty.h>
#endif

namespace lily::test {
namespace {

namespace fs = std::filesystem;

class Terminal {
 public:
  explicit Terminal(const std::string& home,
                    std::vector<const char*> arguments = {"lily", "run", "-m", "models/lily-tiny",
                                                          "--no-think", "-t", "0"}) {
    arguments.push_back(nullptr);
    child_ = forkpty(&fd_, nullptr, nullptr, nullptr);
    if (child_ != 0) return;
    setenv("HOME", home.c_str(), 1);
    unsetenv("LILY_CACHE");
    unsetenv("LILY_MODEL");
    execv(LILY_PROGRAM, const_cast<char* const*>(arguments.data()));
    _exit(127);
  }
  ~Terminal() {
    if (child_ > 0) kill(child_, SIGKILL);
    close(fd_);
  }

  void type(const std::string& keys) {
    ASSERT_EQ(write(fd_, keys.data(), keys.size()), static_cast<ssize_t>(keys.size()));
  }

  // What has come since the last call, up to and with `text`; all of it where that does not come within 20 s.
  std::string wait_for(const std::string& text) {
    for (int i = 0; i < 200; ++i) {
      if (const size_t at = seen_.find(text); at != std::string::npos) {
        std::string before = seen_.substr(0, at + text.size());
        seen_.erase(0, at + text.size());
        return before;
      }
      pollfd waiting{fd_, POLLIN, 0};
      if (poll(&waiting, 1, 100) <= 0) continue;
      char buffer[4096];
      const ssize_t n = read(fd_, buffer, sizeof buffer);
      if (n <= 0) break;
      seen_.append(buffer, static_cast<size_t>(n));
    }
    ADD_FAILURE() << "'" << text << "' did not come; got: " << seen_;
    return seen_;
  }

  int exit_code() {
    int status = 0;
    for (int i = 0; i < 200; ++i) {
      if (waitpid(child_, &status, WNOHANG) == child_) {
        child_ = -1;
        return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
      }
      pollfd waiting{fd_, POLLIN, 0};
      char buffer[4096];
      if (poll(&waiting, 1, 100) > 0 && read(fd_, buffer, sizeof buffer) < 0) usleep(10000);
    }
    return -1;  // still running after 20 s
  }

 private:
  pid_t child_ = -1;
  int fd_ = -1;
  std::string seen_;
};

class Chat : public testing::Test {
 protected:
  void SetUp() override {
    home_ = fs::temp_directory_path() / ("lily_chat_" + std::to_string(getpid()));
    fs::create_directories(home_);
  }
  void TearDown() override { fs::remove_all(home_); }
  // Tokens of the last prompt that were not read again, from /stats.
  static int cached_of(Terminal& terminal) {
    terminal.type("/stats\r");
    const std::string line = terminal.wait_for(" cached)");
    return std::atoi(line.c_str() + line.rfind('(') + 1);
  }
  fs::path home_;
};

TEST_F(Chat, LaterTurnsDoNotReadEarlierOnesAgain) {
  Terminal terminal(home_);
  terminal.wait_for("> ");
  terminal.type("Define instant.\r");
  terminal.wait_for("heart to beat)");
  EXPECT_EQ(cached_of(terminal), 0);
  terminal.type("What does the word river mean?\r");
  terminal.wait_for("larger than a creek)");
  const int second = cached_of(terminal);
  EXPECT_GT(second, 0);
  terminal.type("Greet me in Polish.\r");
  terminal.wait_for("\xC5\x9B\xC4\x87");
  EXPECT_GT(cached_of(terminal), second);
  terminal.type("/quit\r");
  EXPECT_EQ(terminal.exit_code(), 0);
}

TEST_F(Chat, APasteOfSeveralLinesIsOneMessage) {
  const fs::path saved = home_ / "saved.json";
  Terminal terminal(home_);
  terminal.wait_for("> ");
  terminal.type("\x1b[200~What does the word\nriver mean?\x1b[201~\r");
  terminal.wait_for("\x1b[?2004h");  // the next prompt
  terminal.type("/save " + saved.string() + "\r");
  terminal.wait_for("messages written");
  terminal.type("\x04");  // Ctrl-D
  EXPECT_EQ(terminal.exit_code(), 0);
  std::ifstream in(saved);
  const auto json = nlohmann::json::parse(in);
  ASSERT_EQ(json["messages"].size(), 2u);
  EXPECT_EQ(json["messages"][0]["content"], "What does the word\nriver mean?");
  EXPECT_TRUE(fs::exists(home_ / ".cache/lily/history"));
}

TEST_F(Chat, GoesOnInAnotherProcessWhereItWasSaved) {
  const fs::path saved = home_ / "saved.lily";
  {
    Terminal terminal(home_);
    terminal.wait_for("> ");
    terminal.type("What does the word river mean?\r");
    terminal.wait_for("larger than a creek)");
    terminal.wait_for("\x1b[?2004h");
    terminal.type("/save " + saved.string() + "\r");
    terminal.wait_for("state written");
    terminal.type("/quit\r");
    EXPECT_EQ(terminal.exit_code(), 0);
  }
  Terminal terminal(home_);
  terminal.wait_for("> ");
  terminal.type("/load " + saved.string() + "\r");
  terminal.wait_for("2 messages and the model's state read");
  terminal.type("Define instant.\r");
  terminal.wait_for("heart to beat)");
  EXPECT_GT(cached_of(terminal), 0);
  terminal.type("/quit\r");
  EXPECT_EQ(terminal.exit_code(), 0);
}

TEST_F(Chat, MistakesAreToldAndTheChatGoesOn) {
  Terminal terminal(home_);
  terminal.wait_for("> ");
  terminal.type("/fly\r");
  terminal.wait_for("no command /fly");
  terminal.type("/help \r");
  terminal.wait_for("this list");
  terminal.type("/think maybe\r");
  terminal.wait_for("expected on or off");
  terminal.type("/load /nonexistent.json\r");
  terminal.wait_for("/nonexistent.json");
  terminal.type("\x03");  // Ctrl-C at the prompt changes nothing
  terminal.type("What does the word river mean?\r");
  terminal.wait_for("larger than a creek)");
  terminal.type("/quit\r");
  EXPECT_EQ(terminal.exit_code(), 0);
}

TEST(Eval, ShowsItsProgress) {
  Terminal terminal("/nonexistent", {"lily", "eval", "-m", "lily-tiny", "--text", "AGENTS.md"});
  terminal.wait_for("text [");
  terminal.wait_for(" tokens");
  terminal.wait_for("perplexity");
  EXPECT_EQ(terminal.exit_code(), 0);
}

}  // namespace
}  // namespace lily::test
