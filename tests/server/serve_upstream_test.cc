// Two programs as a person starts them: one with the model, one that passes its requests on to it.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/server/serve.h"

namespace lily::test {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kAnswer = "river (noun): a large natural stream of water (larger than a creek)";

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
  // A request is counted when its connection is done with it, after the client has its answer.
  constexpr std::string_view kCounted = "lily_upstream_requests_total{upstream=\"big\",result=\"ok\"} 2";
  std::string metrics;
  for (int n = 0; n < 500 && metrics.find(kCounted) == metrics.npos; ++n) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    metrics = front.ask("/metrics", "").body;
  }
  EXPECT_NE(metrics.find(kCounted), metrics.npos) << metrics;

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
