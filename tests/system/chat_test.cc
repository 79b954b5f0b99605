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

TEST_F(Chat, ASavedConversationWithoutAQuestionLoads) {
  for (const char* name : {"saved.json", "saved.lily"}) {
    const std::string saved = (home_ / name).string();
    Terminal terminal(home_, {"lily", "run", "-m", "models/lily-tiny", "--system", "Be short."});
    terminal.wait_for("> ");
    terminal.type("/save " + saved + "\r");
    terminal.wait_for("written to");
    terminal.type("/system\r");
    terminal.wait_for("the conversation is forgotten; so is the system message");
    const std::string empty = (home_ / "empty").string() + name;
    terminal.type("/save " + empty + "\r");
    terminal.wait_for("written to " + empty);
    terminal.type("/load " + empty + "\r");
    terminal.wait_for("read from " + empty);
    terminal.type("/load " + saved + "\r");
    terminal.wait_for("1 message");
    terminal.wait_for("read from " + saved);
    terminal.type("/reset\r");
    terminal.wait_for("the conversation is forgotten; the system message stays");
    terminal.type("/system Be long.\r");
    terminal.wait_for("the conversation is forgotten; the system message is new");
    terminal.type("/quit\r");
    EXPECT_EQ(terminal.exit_code(), 0);
  }
}

TEST_F(Chat, AFileOfSomebodyElseIsNotOverwritten) {
  const fs::path notes = home_ / "notes.txt", json = home_ / "notes.json", ours = home_ / "ours.json";
  std::ofstream(notes) << "mine\n";
  std::ofstream(json) << "{\"mine\": 1}\n";
  Terminal terminal(home_);
  terminal.wait_for("> ");
  for (const fs::path& path : {notes, json}) {
    terminal.type("/save " + path.string() + "\r");
    terminal.wait_for(path.string() + ": is there already and is no saved conversation; choose another name");
  }
  for (int i = 0; i < 2; ++i) {  // its own is replaced
    terminal.type("/save " + ours.string() + "\r");
    terminal.wait_for("written to " + ours.string());
  }
  terminal.type("/save /nodir/x\r");
  terminal.wait_for("lily: /nodir/x: cannot be created");
  terminal.type("/load " + json.string() + "\r");
  terminal.wait_for("notes.json: expected a JSON object with \"messages\"");
  terminal.type("/quit\r");
  EXPECT_EQ(terminal.exit_code(), 0);
  EXPECT_EQ(fs::file_size(notes), 5u);
  EXPECT_EQ(fs::file_size(json), 12u);
}

TEST_F(Chat, KeepsNoHistoryWhereNoneIsWanted) {
  Terminal terminal(home_, {"lily", "run", "-m", "models/lily-tiny", "--no-history"});
  terminal.wait_for("> ");
  terminal.type("/help\r");
  terminal.wait_for("No history of prompts is kept.");
  terminal.type("/quit\r");
  EXPECT_EQ(terminal.exit_code(), 0);
  EXPECT_FALSE(fs::exists(home_ / ".cache/lily/history"));
}

TEST_F(Chat, CtrlCIsAnsweredAtOnceAndASecondOneSaysWhatItEnds) {
  Terminal terminal(home_, {"lily", "run", "-m", "models/lily-tiny", "--no-think", "--backend", "reference"});
  terminal.wait_for("> ");
  std::string question = "\x1b[200~";
  for (int i = 0; i < 400; ++i) question += "river creek ";  // long to read on this backend
  terminal.type(question + "\x1b[201~\r");
  terminal.wait_for("\x1b[?2004l");  // the editor has sent it
  usleep(200000);                    // until the terminal's keys are signals again
  terminal.type("\x03");
  terminal.wait_for("lily: stopping ...");
  terminal.type("\x03");
  terminal.wait_for("lily: the chat was ended by a second Ctrl-C");
  EXPECT_EQ(terminal.exit_code(), 130);
}

TEST_F(Chat, MistakesAreToldAndTheChatGoesOn) {
  Terminal terminal(home_);
  terminal.wait_for("> ");
  terminal.type("/fly\r");
  terminal.wait_for("no command /fly");
  terminal.type("/help \r");
  terminal.wait_for("this list");
  terminal.wait_for(".cache/lily/history; lily run --no-history keeps none.");
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
