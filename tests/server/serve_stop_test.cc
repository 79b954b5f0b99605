// A device that never brings back a step, and the end of the program: `lily serve` as a person starts it,
// whose engine thread is held in the middle of a step.
#include <gtest/gtest.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <thread>

#include "tests/server/serve.h"

namespace lily::test {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

// Ticks of processor time by thread.
std::map<pid_t, int64_t> times_of(pid_t process) {
  std::map<pid_t, int64_t> out;
  std::error_code ignored;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/" + std::to_string(process) + "/task", ignored)) {
    std::string line;
    std::getline(std::ifstream(entry.path() / "stat"), line);
    std::istringstream fields(line.substr(std::min(line.size(), line.rfind(')') + 1)));
    std::string field;
    int64_t user = 0, system = 0;
    for (int i = 3; i <= 13; ++i) fields >> field;
    if (fields >> user >> system) out[std::stoi(entry.path().filename())] = user + system;
  }
  return out;
}

// Holds one thread of a process; the others run on. All calls come from one thread, as ptrace wants it.
class HeldThread {
 public:
  // The one that has computed for so long since now. Not held: where ptrace is not allowed.
  explicit HeldThread(pid_t process, int64_t least_ticks = 5) {
    const auto before = times_of(process);
    for (int i = 0; i < 3000 && thread_ < 0; ++i) {
      std::this_thread::sleep_for(10ms);
      for (const auto& [thread, ticks] : times_of(process)) {
        const auto at = before.find(thread);
        if (ticks - (at == before.end() ? 0 : at->second) >= least_ticks) thread_ = thread;
      }
    }
    if (thread_ < 0) {
      ADD_FAILURE() << "no thread computes";
      return;
    }
    if (ptrace(PTRACE_SEIZE, thread_, nullptr, nullptr) != 0) {
      why_not_ = std::strerror(errno);
      return;
    }
    ptrace(PTRACE_INTERRUPT, thread_, nullptr, nullptr);
    int status = 0;
    waitpid(thread_, &status, __WALL);
    is_held_ = WIFSTOPPED(status);
  }
  ~HeldThread() { let_go(); }
  HeldThread(const HeldThread&) = delete;
  HeldThread& operator=(const HeldThread&) = delete;

  bool is_held() const { return is_held_; }
  const std::string& why_not() const { return why_not_; }
  void let_go() {
    if (is_held_) ptrace(PTRACE_DETACH, thread_, nullptr, nullptr);
    is_held_ = false;
  }
  // That the whole process has ended; without this look it would not be gone for its parent.
  bool has_ended_within(std::chrono::seconds patience) {
    for (const auto end = Clock::now() + patience; Clock::now() < end; std::this_thread::sleep_for(10ms)) {
      int status = 0;
      if (waitpid(thread_, &status, __WALL | WNOHANG) == thread_ && !WIFSTOPPED(status)) {
        is_held_ = false;
        return true;
      }
    }
    return false;
  }

 private:
  pid_t thread_ = -1;
  bool is_held_ = false;
  std::string why_not_;
};

// So many words that reading them takes far longer than it takes to hold the thread that does, on a busy
// machine too.
std::string long_prompt(bool stream) {
  std::string words;
  for (int i = 0; i < 12000; ++i) words += "river stone house ";
  return Json{{"messages", {{{"role", "user"}, {"content", words}}}}, {"stream", stream}, {"max_tokens", 4}}
      .dump();
}

constexpr const char* kQuestion =
    R"({"messages": [{"role": "user", "content": "What does the word river mean?"}], "temperature": 0, "reasoning_effort": "none"})";

// One thread, so that it is the engine's that computes.
std::vector<std::string> options(std::vector<std::string> more) {
  more.insert(more.end(), {"--threads", "1", "--ctx", "65536"});
  return more;
}

TEST(ServeStop, AStepThatNeverReturnsDoesNotKeepTheProgramFromEnding) {
  Serve server(options({"--drain", "1"}));
  Connection streamed(server.port()), whole(server.port());
  streamed.post("/v1/chat/completions", long_prompt(true));
  streamed.read_until("assistant");
  HeldThread held(server.child().pid());
  if (!held.is_held()) GTEST_SKIP() << "no thread can be held here: " << held.why_not();
  whole.post("/v1/chat/completions", kQuestion);  // waits its turn
  const auto begin = Clock::now();
  server.child().send(SIGTERM);
  const std::string said = streamed.read_until("stopping", 20s);
  EXPECT_NE(said.find(R"("code":"stopping")"), std::string::npos) << said;
  const auto reply = whole.read(20s);
  if (reply) EXPECT_EQ(Json::parse(reply->body)["error"]["code"], "stopping") << reply->body;
  EXPECT_TRUE(held.has_ended_within(60s));
  // The drain limit, the last moment that is left to the step, and what a busy machine takes.
  EXPECT_LT(Clock::now() - begin, 1s + 5s + 10s);
  held.let_go();
  EXPECT_EQ(server.child().wait(), 1) << server.said();
  EXPECT_NE(server.said().find("the device has not brought back its step"), std::string::npos)
      << server.said();
}

TEST(ServeStop, AStepThatNeverReturnsAndNobodyWaitsFor) {
  Serve server(options({"--drain", "0"}));
  std::optional<Connection> client(server.port());
  client->post("/v1/chat/completions", long_prompt(false));
  HeldThread held(server.child().pid());
  if (!held.is_held()) GTEST_SKIP() << "no thread can be held here: " << held.why_not();
  client.reset();
  // What waits for the engine is no hindrance either.
  Connection other(server.port());
  other.request("DELETE", "/cache");
  EXPECT_FALSE(other.read(300ms));
  server.child().send(SIGTERM);
  EXPECT_TRUE(held.has_ended_within(60s));
  held.let_go();
  EXPECT_EQ(server.child().wait(), 1) << server.said();
}

TEST(ServeStop, AHungStepFailsItsRequestAndTheNextOneWorks) {
  // Longer than a step on a busy machine, which would fail before it is held.
  Serve server(options({"--step-timeout", "5"}));
  Connection hung(server.port());
  hung.post("/v1/chat/completions", long_prompt(false));
  HeldThread held(server.child().pid());
  if (!held.is_held()) GTEST_SKIP() << "no thread can be held here: " << held.why_not();
  const auto reply = hung.read(30s);
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->status, 500);
  const Json error = Json::parse(reply->body)["error"];
  EXPECT_EQ(error["code"], "step_timeout");
  EXPECT_NE(error["message"].get<std::string>().find("no step for"), std::string::npos) << error;
  const HttpReply also = server.ask("/v1/messages", R"({"max_tokens": 4, "messages": [
      {"role": "user", "content": "hello"}]})");
  EXPECT_EQ(also.status, 500) << also.body;
  EXPECT_NE(also.body.find("no step for"), std::string::npos) << also.body;
  held.let_go();
  const HttpReply next = server.ask("/v1/chat/completions", kQuestion);
  EXPECT_EQ(next.status, 200) << next.body;
  EXPECT_NE(next.body.find("river (noun)"), std::string::npos) << next.body;
  server.child().send(SIGTERM);
  EXPECT_EQ(server.child().wait(), 0) << server.said();
}

TEST(ServeStop, ASignalEndsAnIdleServerAtOnce) {
  Serve server({});
  EXPECT_EQ(server.ask("/v1/chat/completions", kQuestion).status, 200);
  const auto begin = Clock::now();
  server.child().send(SIGTERM);
  EXPECT_EQ(server.child().wait(), 0) << server.said();
  EXPECT_LT(Clock::now() - begin, 10s);
}

}  // namespace
}  // namespace lily::test
