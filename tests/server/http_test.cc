// The server from outside, over a socket: answers, refusals, clients that leave.
#include <fmt/format.h>

#include "tests/server/scripted_server.h"

namespace lily::test {
namespace {

using server::Json;
using namespace std::chrono_literals;

class Http : public ScriptedServer {};

TEST_F(Http, AnswersAsAWhole) {
  start();
  const HttpReply reply = ask("POST", "/v1/chat/completions", kHello);
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(reply.headers.at("content-type"), "application/json");
  const Json json = json_of(reply);
  EXPECT_EQ(json["choices"][0]["message"]["content"], says_);
  EXPECT_EQ(json["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(json["usage"]["prompt_tokens"].get<int>() + json["usage"]["completion_tokens"].get<int>(),
            json["usage"]["total_tokens"].get<int>());
}

TEST_F(Http, StreamsWhatTheWholeAnswerSays) {
  start();
  const HttpReply reply = ask("POST", "/v1/chat/completions", kHelloStreamed);
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(reply.headers.at("content-type"), "text/event-stream");
  EXPECT_EQ(reply.headers.at("cache-control"), "no-cache");
  std::string content;
  size_t n_events = 0, at = 0;
  for (size_t end = 0; (end = reply.body.find("\n\n", at)) != std::string::npos; at = end + 2, ++n_events) {
    const std::string line = reply.body.substr(at, end - at);
    ASSERT_EQ(line.rfind("data: ", 0), 0u) << line;
    if (line == "data: [DONE]") continue;
    const Json delta = Json::parse(line.substr(6))["choices"][0]["delta"];
    if (delta.contains("content")) content += delta["content"].get<std::string>();
  }
  EXPECT_EQ(content, says_);
  EXPECT_GE(n_events, 6u);
  EXPECT_EQ(reply.body.substr(reply.body.size() - 14), "data: [DONE]\n\n");
}

TEST_F(Http, HeadersAndTheRoleComeBeforeThePromptIsRead) {
  start();
  executor_->hold();
  Connection client(port_);
  client.post("/v1/chat/completions", kHelloStreamed);
  EXPECT_NE(client.read_until("assistant").find("\"role\":\"assistant\""), std::string::npos);
}

TEST_F(Http, ALongPromptIsKeptAliveByTheClock) {
  start({}, {.keep_alive = 50ms});
  executor_->hold();
  Connection client(port_);
  client.post("/v1/chat/completions", kHelloStreamed);
  EXPECT_NE(client.read_until(": keep-alive\n\n").find(": keep-alive\n\n"), std::string::npos);
  executor_->allow(-1);
  EXPECT_NE(client.read_until("[DONE]").find("four"), std::string::npos);
}

TEST_F(Http, AClientThatLeavesIsCancelledWhileThePromptIsRead) {
  for (const char* body : {kHello, kHelloStreamed}) {
    SCOPED_TRACE(body);
    start();
    executor_->hold();
    {
      Connection client(port_);
      client.post("/v1/chat/completions", body);
      executor_->await_held();
    }
    EXPECT_TRUE(
        eventually([&] { return service_->metrics().find("clients_left_total 1") != std::string::npos; }));
    executor_->allow(-1);
    EXPECT_TRUE(eventually([&] { return assistant_->engine().stats().n_running == 0; }));
    EXPECT_LT(assistant_->engine().stats().completion_tokens, 3);
    expect_alive();
    stop();
  }
}

TEST_F(Http, AFullQueueIs503) {
  start({}, {}, {.max_sequences = 1, .queue_capacity = 1});
  executor_->hold();
  Connection first(port_), second(port_);
  first.post("/v1/chat/completions", kHello);
  executor_->await_held();
  second.post("/v1/chat/completions", kHello);
  EXPECT_TRUE(eventually([&] { return assistant_->engine().stats().n_waiting == 1; }));
  const HttpReply third = ask("POST", "/v1/chat/completions", kHello);
  EXPECT_EQ(third.status, 503);
  EXPECT_EQ(json_of(third)["error"]["code"], "queue_full");
  EXPECT_TRUE(third.headers.contains("retry-after"));
  executor_->allow(-1);
  EXPECT_EQ(first.read()->status, 200);
  EXPECT_EQ(second.read()->status, 200);
}

TEST_F(Http, ATooLongPromptIs400WithBothNumbers) {
  start();
  std::string words;
  for (int i = 0; i < 3000; ++i) words += "word ";
  const HttpReply reply =
      ask("POST", "/v1/chat/completions",
          Json{{"messages", {{{"role", "user"}, {"content", words}}}}, {"stream", true}}.dump());
  EXPECT_EQ(reply.status, 400);
  const Json error = json_of(reply)["error"];
  EXPECT_EQ(error["code"], "context_length_exceeded");
  EXPECT_EQ(error["n_ctx"], 2048);
  EXPECT_GT(error["n_prompt_tokens"].get<int>(), 3000);
}

TEST_F(Http, TheModelIsListedWithWhatItHolds) {
  start();
  const Json list = json_of(ask("GET", "/v1/models"));
  EXPECT_EQ(list["object"], "list");
  ASSERT_EQ(list["data"].size(), 1u);
  Json model = list["data"][0];
  EXPECT_EQ(json_of(ask("GET", "/v1/models/lily-tiny")), model);
  EXPECT_EQ(json_of(ask("GET", "/models/lily-tiny")), model);
  EXPECT_EQ(json_of(ask("GET", "/models")), list);
  EXPECT_GT(model["created"], 1'600'000'000);
  model.erase("created");
  EXPECT_EQ(nlohmann::json(model),
            nlohmann::json::parse(R"({"id": "lily-tiny", "object": "model", "owned_by": "lily",
      "max_model_len": 2048, "context_length": 2048})"));
}

TEST_F(Http, TheCacheIsToldAndEmptied) {
  start();
  const auto cache = [&] { return json_of(ask("GET", "/cache")); };
  chat();
  EXPECT_TRUE(eventually([&] { return cache()["entries"] > 0; }));
  EXPECT_EQ(cache()["misses"], 1);
  chat();
  const Json full = cache();
  EXPECT_EQ(full["hits"], 1);
  EXPECT_EQ(full["misses_by_reason"]["differs"].get<int>() + full["misses_by_reason"]["unknown"].get<int>(),
            1);
  EXPECT_LT(full["kv_blocks"]["free"], full["kv_blocks"]["total"]);
  const Json empty = json_of(ask("DELETE", "/cache"));
  EXPECT_EQ(empty["entries"], 0);
  EXPECT_EQ(empty["kv_blocks"]["free"], empty["kv_blocks"]["total"]);
  EXPECT_EQ(chat()["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
}

TEST_F(Http, CountedTokensAreThoseOfThePrompt) {
  start();
  const std::string body =
      R"({"model": "x", "max_tokens": 9, "system": "Be brief.", "messages": [{"role": "user", "content": "hi"}]})";
  const Json counted = json_of(ask("POST", "/v1/messages/count_tokens", body));
  const Json usage = json_of(ask("POST", "/v1/messages", body))["usage"];
  EXPECT_EQ(counted["input_tokens"],
            usage["input_tokens"].get<int>() + usage["cache_read_input_tokens"].get<int>());
  EXPECT_EQ(counted.size(), 1u);
}

TEST_F(Http, WhileLoadingOnlyHealthAnswers) {
  is_loaded_ = false;
  start();
  EXPECT_EQ(ask("GET", "/health").status, 503);
  const HttpReply reply = ask("POST", "/v1/chat/completions", kHello);
  EXPECT_EQ(reply.status, 503);
  EXPECT_EQ(json_of(reply)["error"]["code"], "loading");
  http_->set_service(*service_);
  EXPECT_EQ(ask("GET", "/health").status, 200);
  expect_alive();
}

TEST_F(Http, ErrorsAreJsonOfTheRightStatus) {
  start();
  const struct {
    const char *method, *path, *body;
    int status;
  } cases[] = {
      {"GET", "/nope", "", 404},
      {"POST", "/nope", "{}", 404},
      {"POST", "/v1/models", "{}", 405},
      {"GET", "/v1/chat/completions", "", 405},
      {"PUT", "/v1/chat/completions", "{}", 405},
      {"GET", "/v1/models/other", "", 404},
      {"POST", "/v1/models/lily-tiny", "{}", 405},
      {"POST", "/v1/responses/resp_1", "{}", 405},
      {"POST", "/v1/chat/completions", "{", 400},
      {"POST", "/v1/chat/completions", "[]", 400},
      {"POST", "/v1/chat/completions", "{}", 400},
      {"POST", "/v1/chat/completions", "{\"messages\": []}", 400},
      {"POST", "/v1/chat/completions", "{\"messages\": \"\xff\"}", 400},
      {"POST", "/v1/completions", "{\"prompt\": [-1]}", 400},
      {"POST", "/tokenize", "{}", 400},
      {"POST", "/detokenize", "{\"tokens\": [99999999]}", 400},
  };
  for (const auto& c : cases) {
    const HttpReply reply = ask(c.method, c.path, c.body);
    EXPECT_EQ(reply.status, c.status) << c.method << " " << c.path << " " << c.body;
    EXPECT_TRUE(json_of(reply)["error"]["message"].is_string()) << reply.body;
    EXPECT_EQ(json_of(reply)["error"]["type"], c.status == 400 ? "invalid_request_error" : "not_found_error")
        << reply.body;
  }
}

TEST_F(Http, BodiesMayComeInChunksAndAskFirst) {
  start();
  const std::string body = kHello;
  Connection chunked(port_);
  chunked.send("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n");
  for (size_t at = 0; at < body.size(); at += 20) {
    const std::string part = body.substr(at, 20);
    chunked.send(fmt::format("{:x}\r\n{}\r\n", part.size(), part));
  }
  chunked.send("0\r\n\r\n");
  EXPECT_EQ(json_of(chunked.read().value())["choices"][0]["message"]["content"], says_);

  Connection asking(port_);
  asking.send(
      fmt::format("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n"
                  "Expect: 100-continue\r\n\r\n",
                  body.size()));
  EXPECT_EQ(asking.read()->status, 100);
  asking.send(body);
  EXPECT_EQ(json_of(asking.read().value())["choices"][0]["message"]["content"], says_);
}

TEST_F(Http, AQueryIsNoPartOfThePath) {
  start();
  EXPECT_EQ(ask("POST", "/v1/messages?beta=true",
                R"({"model": "x", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]})")
                .status,
            200);
}

TEST_F(Http, AConnectionServesOneRequestAfterTheOther) {
  start();
  Connection client(port_);
  for (int i = 0; i < 3; ++i) {
    client.post("/v1/chat/completions", kHello);
    const auto reply = client.read();
    ASSERT_TRUE(reply);
    EXPECT_EQ(reply->status, 200);
  }
}

TEST_F(Http, TokensAndTemplateCanBeLookedAt) {
  start();
  const Json tokens = json_of(ask("POST", "/tokenize", R"({"content": "hello world"})"));
  EXPECT_EQ(tokens["count"], tokens["tokens"].size());
  EXPECT_EQ(json_of(ask("POST", "/detokenize", Json{{"tokens", tokens["tokens"]}}.dump()))["content"],
            "hello world");
  EXPECT_NE(json_of(ask("POST", "/apply-template", kHello))["prompt"].get<std::string>().find(
                "<|im_start|>user\nhello"),
            std::string::npos);
}

}  // namespace
}  // namespace lily::test
