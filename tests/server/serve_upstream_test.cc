// Two programs as a person starts them: one with the model, one that passes its requests on to it.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/hub/child.h"
#include "tests/server/connection.h"

namespace lily::test {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kAnswer = "river (noun): a large natural stream of water (larger than a creek)";

class Serve {
 public:
  Serve(std::vector<std::string> more, std::map<std::string, std::string> environment) {
    std::vector<std::string> arguments = {"serve",      "-m", "models/lily-tiny", "--port", "0",
                                          "--parallel", "1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    environment.insert({{"HOME", "/nonexistent"}, {"no_proxy", "127.0.0.1"}});
    child_ = std::make_unique<Child>(arguments, environment);
    constexpr std::string_view kReady = "ready at http://127.0.0.1:";
    for (int i = 0; i < 6000 && port_ == 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));  // also for the child to open its files
      const std::string said = child_->err();
      const size_t at = said.find(kReady);
      if (at != said.npos && said.find('\n', at) != said.npos)
        port_ = std::stoi(said.substr(at + kReady.size()));
    }
    if (port_ == 0) throw std::runtime_error("no server: " + child_->err());
  }
  std::string url() const { return fmt::format("http://127.0.0.1:{}/v1", port_); }
  HttpReply ask(const std::string& path, const std::string& body, const std::string& headers = {}) const {
    Connection connection(port_);
    connection.request(body.empty() ? "GET" : "POST", path, body, headers);
    return connection.read(std::chrono::seconds(60)).value_or(HttpReply{});
  }
  std::string said() const { return child_->err(); }
  void kill() { child_.reset(); }

 private:
  std::unique_ptr<Child> child_;
  int port_ = 0;
};

TEST(ServeUpstream, OneAddressServesBothModels) {
  Serve big({"--api-key", "sk-of-the-big-one"}, {});
  Serve front({"--upstream", "big=" + big.url()}, {{"LILY_UPSTREAM_KEY_BIG", "sk-of-the-big-one"}});
  Json body = {{"model", "big"},
               {"messages", {{{"role", "user"}, {"content", "What does the word river mean?"}}}},
               {"temperature", 0},
               {"reasoning_effort", "none"}};
  for (const char* model : {"big", "lily-tiny"}) {
    body["model"] = model;
    const HttpReply reply = front.ask("/v1/chat/completions", body.dump());
    EXPECT_EQ(reply.status, 200) << reply.body;
    EXPECT_EQ(Json::parse(reply.body)["choices"][0]["message"]["content"], kAnswer);
    EXPECT_EQ(Json::parse(reply.body)["model"], model);
  }
  body["model"] = "big";
  body["stream"] = true;
  const HttpReply streamed = front.ask("/v1/chat/completions", body.dump());
  std::string content;
  for (size_t at = 0; (at = streamed.body.find("data: {", at)) != std::string::npos; ++at) {
    const Json delta = Json::parse(
        streamed.body.substr(at + 6, streamed.body.find("\n\n", at) - at - 6))["choices"][0]["delta"];
    content += delta.value("content", "");
  }
  EXPECT_EQ(content, kAnswer);
  EXPECT_TRUE(streamed.body.ends_with("data: [DONE]\n\n")) << streamed.body;
  EXPECT_EQ(Json::parse(front.ask("/v1/models", "").body)["data"][1]["id"], "big");
  EXPECT_NE(
      front.ask("/metrics", "").body.find("lily_upstream_requests_total{upstream=\"big\",result=\"ok\"} 2"),
      std::string::npos);

  EXPECT_NE(front.said().find("model big is answered by " + big.url()), std::string::npos) << front.said();
  for (const std::string& said : {front.said(), big.said()}) {
    EXPECT_EQ(said.find("sk-of-the-big-one"), std::string::npos) << said;
    EXPECT_EQ(said.find("What does"), std::string::npos) << said;
  }
  big.kill();
  const HttpReply down = front.ask("/v1/messages", R"({"model": "big", "max_tokens": 1, "messages": []})");
  EXPECT_EQ(down.status, 502) << down.body;
  EXPECT_EQ(Json::parse(down.body)["type"], "error");
}

TEST(ServeUpstream, AWrongKeyIsTheServersFault) {
  Serve big({"--api-key", "sk-of-the-big-one"}, {});
  Serve front({"--upstream", "big=" + big.url()}, {});
  EXPECT_NE(front.said().find("LILY_UPSTREAM_KEY_BIG is not set"), std::string::npos) << front.said();
  // The key of the client is for this server and not for that one.
  const HttpReply reply = front.ask("/v1/chat/completions", R"({"model": "big", "messages": []})",
                                    "Authorization: Bearer sk-of-the-big-one\r\n");
  EXPECT_EQ(reply.status, 502) << reply.body;
  EXPECT_NE(reply.body.find("LILY_UPSTREAM_KEY_BIG"), std::string::npos) << reply.body;
}

TEST(ServeUpstream, WrongSettingsAreOneLineBeforeAnythingIsLoaded) {
  const std::vector<std::vector<std::string>> wrong = {
      {"big"},
      {"lily-tiny=http://127.0.0.1:1"},
      {"a=http://127.0.0.1:1", "--upstream", "a=http://127.0.0.1:2"}};
  for (std::vector<std::string> arguments : wrong) {
    arguments.insert(arguments.begin(), {"serve", "-m", "models/lily-tiny", "--port", "0", "--upstream"});
    Child child(arguments, {{"HOME", "/nonexistent"}});
    EXPECT_EQ(child.wait(), 2);
    EXPECT_TRUE(child.err().starts_with("lily: --upstream ")) << child.err();
    EXPECT_EQ(child.err().find('\n'), child.err().size() - 1) << child.err();
  }
}

}  // namespace
}  // namespace lily::test
