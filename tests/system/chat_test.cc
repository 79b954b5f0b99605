// The interactive chat on a pseudo-terminal, as a person uses it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/system/terminal.h"

namespace lily::test {
namespace {

namespace fs = std::filesystem;

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

TEST_F(Chat, WhatIsTypedBeforeThePromptIsSent) {
  Terminal terminal(home_);
  terminal.type("What does the word river mean?\r");  // while the program starts and the model loads
  terminal.wait_for("larger than a creek)");
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

}  // namespace
}  // namespace lily::test
