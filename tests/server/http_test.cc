// The server from outside, over a socket: answers, refusals, clients that leave, clients that misbehave.
#include <fmt/format.h>

#include <gmock/gmock.h>

#include <atomic>
#include <mutex>
#include <random>

#include "base/log.h"
#include "tests/server/scripted_server.h"

namespace lily::test {
namespace {

using server::Json;
using namespace std::chrono_literals;

class Http : public ScriptedServer {};

Json json_of(const HttpReply& reply) { return Json::parse(reply.body); }

// What is logged while the server runs; the sink is empty again before this goes.
class Lines {
 public:
  Lines() {
    set_log_sink([lines = lines_](LogLevel, std::string_view line) {
      const std::lock_guard lock(lines->mutex);
      lines->all += std::string(line) + "\n";
    });
  }
  ~Lines() { set_log_sink({}); }
  std::string all() const {
    const std::lock_guard lock(lines_->mutex);
    return lines_->all;
  }

 private:
  struct Shared {
    std::mutex mutex;
    std::string all;
  };
  std::shared_ptr<Shared> lines_ = std::make_shared<Shared>();
};

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

TEST_F(Http, StopsAlsoWhenItHasHardlyBegun) {
  for (int i = 0; i < 50; ++i) {
    server::HttpServer http({.port = 0, .n_threads = 1});
    const int port = http.bind();
    std::thread listener([&] { http.listen(); });
    http.stop();
    listener.join();
    EXPECT_THROW(Connection{port}, std::runtime_error);
  }
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

TEST_F(Http, AKeyIsAskedFor) {
  start({.api_key = "secret"});
  const HttpReply without = ask("POST", "/v1/chat/completions", kHello);
  EXPECT_EQ(without.status, 401);
  EXPECT_EQ(json_of(without)["error"]["code"], "invalid_api_key");
  for (const char* wrong : {"Authorization: Bearer secre\r\n", "Authorization: Bearer secrets\r\n",
                            "Authorization: secret\r\n", "x-api-key: \r\n"})
    EXPECT_EQ(ask("POST", "/v1/chat/completions", kHello, wrong).status, 401) << wrong;
  EXPECT_EQ(ask("POST", "/v1/chat/completions", kHello, "Authorization: Bearer secret\r\n").status, 200);
  EXPECT_EQ(ask("POST", "/v1/chat/completions", kHello, "x-api-key: secret\r\n").status, 200);
  EXPECT_EQ(ask("GET", "/health").status, 200);
}

TEST_F(Http, PagesOfOtherSitesAreRefused) {
  start();
  EXPECT_EQ(ask("POST", "/v1/chat/completions", kHello, "Origin: http://evil.example\r\n").status, 403);
  EXPECT_EQ(ask("POST", "/v1/chat/completions", kHello, "Origin: http://localhost\r\n").status, 200);
}

TEST_F(Http, ANameThatWasMadeToPointHereIsRefused) {
  start();
  for (const char* path : {"/v1/models", "/health", "/"}) {
    Connection client(port_);
    client.send(
        fmt::format("GET {} HTTP/1.1\r\nHost: evil.example:{}\r\nOrigin: http://evil.example:{}\r\n\r\n",
                    path, port_, port_));
    EXPECT_EQ(client.read()->status, 403) << path;
  }
  for (const char* host : {"localhost", "127.0.0.1", "[::1]:80"}) {
    Connection client(port_);
    client.send(fmt::format("GET /v1/models HTTP/1.1\r\nHost: {}\r\n\r\n", host));
    EXPECT_EQ(client.read()->status, 200) << host;
  }
}

TEST_F(Http, APathCannotForgeALineOfTheLog) {
  const Lines lines;
  start();
  EXPECT_EQ(ask("GET", "/a%0aFAKE%20LINE").status, 404);
  stop();
  const std::string log = lines.all();
  EXPECT_NE(log.find("FAKE"), std::string::npos);
  EXPECT_EQ(log.find("\nFAKE"), std::string::npos) << log;
}

TEST_F(Http, TheLogTellsWhereAPromptDiffersAndItsTextOnlyWhereThatIsAskedFor) {
  static std::mutex mutex;
  static std::string lines;
  for (const bool log_misses : {false, true}) {
    start({}, {.log_misses = log_misses});
    lines.clear();
    set_log_sink([](LogLevel, std::string_view line) {
      const std::lock_guard lock(mutex);
      (lines += line) += '\n';
    });
    const std::string head =
        R"({"temperature": 0, "reasoning_effort": "none", "messages": [{"role": "user", "content": ")";
    ask("POST", "/v1/chat/completions", head + "count the river\"}]}");
    ask("POST", "/v1/chat/completions", head + "count the apple\"}]}");
    stop();
    set_log_sink({});
    EXPECT_NE(lines.find("differs from the nearest one remembered at token"), std::string::npos) << lines;
    for (const char* text : {"count the", "river", "apple"})
      EXPECT_EQ(lines.find(text) != std::string::npos, log_misses) << lines;
  }
}

TEST_F(Http, TheCachesRatesAreAmongTheMetrics) {
  start();
  chat();
  chat();
  for (const char* line : {"cache_hits_total 1", "cache_misses_total 1", "cache_evictions_total 0"})
    EXPECT_TRUE(eventually([&] {
      return service_->metrics().find(std::string("\nlily_") + line + "\n") != std::string::npos;
    })) << line;
  EXPECT_TRUE(eventually([&] {
    return service_->metrics().find("\nlily_cache_hit_ratio 0.") != std::string::npos;
  })) << service_->metrics();
}

TEST_F(Http, AnOriginCanBeAllowed) {
  start({.cors = "http://page.example"});
  const HttpReply reply = ask("POST", "/v1/chat/completions", kHello, "Origin: http://page.example\r\n");
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(reply.headers.at("access-control-allow-origin"), "http://page.example");
  EXPECT_EQ(ask("OPTIONS", "/v1/chat/completions", {}, "Origin: http://page.example\r\n").status, 204);
  EXPECT_EQ(ask("POST", "/v1/chat/completions", kHello, "Origin: http://other.example\r\n").status, 403);
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

TEST_F(Http, DeepJsonIsRefused) {
  start();
  for (const char bracket : {'[', '{'}) {
    std::string body;
    for (int i = 0; i < 100000; ++i) body += bracket == '[' ? "[" : "{\"a\":";
    EXPECT_EQ(ask("POST", "/v1/chat/completions", body).status, 400);
  }
  expect_alive();
}

TEST_F(Http, ATooLongBodyIs413) {
  start();
  Connection client(port_);
  client.send(
      "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n{");
  const auto reply = client.read();
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->status, 413);
  expect_alive();
}

TEST_F(Http, ATooLongBodyInChunksIs413) {
  start({.max_body_bytes = 1 << 20});
  for (const auto& [target, status] : std::vector<std::pair<std::string, int>>{
           {"POST /v1/chat/completions", 413}, {"POST /nope", 404}, {"PUT /v1/chat/completions", 405}}) {
    Connection client(port_);
    client.send(target + " HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n");
    const std::string chunk = "10000\r\n" + std::string(0x10000, ' ') + "\r\n";
    for (int i = 0; i < 17 && client.send(chunk); ++i) {
    }
    const auto reply = client.read();
    ASSERT_TRUE(reply) << target;
    EXPECT_EQ(reply->status, status) << target;
    EXPECT_TRUE(client.is_closed_within(10s)) << target;
  }
  expect_alive();
}

TEST_F(Http, AFormIsNoRequest) {
  start();
  const HttpReply reply = ask("POST", "/v1/chat/completions", "--x\r\n\r\n{}\r\n--x--\r\n",
                              "Content-Type: multipart/form-data; boundary=x\r\n");
  EXPECT_EQ(reply.status, 400);
  EXPECT_NE(reply.body.find("not a form"), std::string::npos) << reply.body;
  expect_alive();
}

TEST_F(Http, GarbageAndTruncationLeaveTheServerAlive) {
  start({.read_timeout_s = 1});
  for (const std::string& bytes :
       {std::string("\0\1\2\3\r\n\r\n", 8), std::string("GET\r\n\r\n"), std::string(100000, 'a'),
        std::string("POST /v1/chat/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n"),
        std::string("POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
        "GET /" + std::string(20000, 'x') + " HTTP/1.1\r\n\r\n",
        "GET /health HTTP/1.1\r\nX: " + std::string(20000, 'x') + "\r\n\r\n"}) {
    Connection client(port_);
    client.send(bytes);
    const auto reply = client.read(3s);
    if (reply) EXPECT_GE(reply->status, 400) << bytes.substr(0, 80);
  }
  {
    Connection client(port_);  // the body never comes
    client.send("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{\"mes");
  }
  expect_alive();
}

TEST_F(Http, ManyHeadersLeaveTheServerAlive) {
  start();
  Connection client(port_);
  client.send("GET /health HTTP/1.1\r\n");
  for (int i = 0; i < 20000; ++i)
    if (!client.send("X-" + std::to_string(i) + ": y\r\n")) break;
  client.send("\r\n");
  client.read(3s);
  expect_alive();
}

TEST_F(Http, ASlowSenderIsDropped) {
  start({.read_timeout_s = 1});
  Connection client(port_);
  client.send("GET /heal");
  EXPECT_TRUE(client.is_closed_within(5s));
  expect_alive();
}

TEST_F(Http, ARequestByteByByteIsDroppedWhenItTakesTooLong) {
  start({.read_timeout_s = 10, .request_timeout_s = 1});
  for (const std::string beginning :
       {"GET /health HTTP/1.1\r\nX: ",
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"}) {
    Connection client(port_);
    client.send(beginning);
    EXPECT_TRUE(eventually([&] {
      client.send("a");
      return client.is_closed_within(10ms);
    })) << beginning;
  }
  expect_alive();
}

TEST_F(Http, ALongAnswerIsNotALateRequest) {
  start({.request_timeout_s = 1});
  executor_->hold();
  Connection client(port_);
  client.post("/v1/chat/completions", kHelloStreamed);
  executor_->await_held();
  std::this_thread::sleep_for(2500ms);  // the connections are looked at every second
  executor_->allow(-1);
  EXPECT_NE(client.read_until("[DONE]").find("four"), std::string::npos);
}

TEST_F(Http, OfRequestsInOneGoTheFirstIsAnsweredAndTheConnectionCloses) {
  start({.keep_alive_s = 1});
  Connection client(port_);
  client.send(
      "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n");
  const auto first = client.read();
  ASSERT_TRUE(first);
  EXPECT_EQ(json_of(*first)["status"], "ready");
  EXPECT_TRUE(client.is_closed_within(5s));
  expect_alive();
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

TEST_F(Http, AFailedStepFailsItsRequestAndTheNextOneWorks) {
  start();
  const size_t n_steps = executor_->steps().size();
  executor_->fail_wait[static_cast<int>(n_steps)] = "the device stumbled";
  const HttpReply reply = ask("POST", "/v1/chat/completions", kHello);
  EXPECT_EQ(reply.status, 500);
  EXPECT_NE(reply.body.find("the device stumbled"), std::string::npos);
  expect_alive();
}

TEST_F(Http, AFailureInAStreamIsToldWithoutDone) {
  start();
  executor_->fail_wait[2] = "the device stumbled";
  const HttpReply reply = ask("POST", "/v1/chat/completions", kHelloStreamed);
  EXPECT_EQ(reply.status, 200);
  EXPECT_NE(reply.body.find("\"error\":{\"message\":\"the device stumbled\""), std::string::npos)
      << reply.body;
  EXPECT_EQ(reply.body.find("[DONE]"), std::string::npos);
  expect_alive();
}

TEST_F(Http, AHungStepFailsItsRequest) {
  start({}, {.step_timeout = 200ms});
  executor_->hold();
  const HttpReply reply = ask("POST", "/v1/chat/completions", kHello);
  EXPECT_EQ(reply.status, 500);
  EXPECT_EQ(json_of(reply)["error"]["code"], "step_timeout");
  executor_->allow(-1);
  expect_alive();
}

TEST_F(Http, WaitingInTheQueueIsNotAHungStep) {
  start({}, {.step_timeout = 1s}, {.max_sequences = 1, .queue_capacity = 4});
  executor_->hold();
  Connection first(port_), second(port_);
  first.post("/v1/chat/completions", kHello);
  executor_->await_held();
  second.post("/v1/chat/completions", kHello);
  EXPECT_TRUE(eventually([&] { return assistant_->engine().stats().n_waiting == 1; }));
  // A step from time to time, slower than the second one would wait for.
  for (int i = 0; i < 6; ++i) {
    std::this_thread::sleep_for(250ms);
    executor_->allow(1);
  }
  executor_->allow(-1);
  EXPECT_EQ(first.read()->status, 200);
  EXPECT_EQ(second.read()->status, 200);
}

TEST_F(Http, StoppingFinishesTheAnswersThatRun) {
  start();
  executor_->hold();
  Connection client(port_);
  client.post("/v1/chat/completions", kHelloStreamed);
  client.read_until("assistant");  // from there on it runs, for the HTTP library too
  executor_->await_held();
  std::thread stopper([&] { http_->stop(); });
  std::this_thread::sleep_for(50ms);
  executor_->allow(-1);
  EXPECT_NE(client.read_until("[DONE]").find("[DONE]"), std::string::npos);
  stopper.join();
}

TEST_F(Http, AnswersThatTakeTooLongWhenStoppingAreGivenUp) {
  for (const char* body : {kHello, kHelloStreamed}) {
    SCOPED_TRACE(body);
    start({.drain_s = 0});
    executor_->hold();
    Connection client(port_), idle(port_), half(port_);
    client.post("/v1/chat/completions", body);
    idle.request("GET", "/health");
    EXPECT_EQ(idle.read()->status, 200);
    half.send("POST /v1/chat/completions HTTP/1.1\r\nConte");
    executor_->await_held();
    if (body == kHelloStreamed) client.read_until("assistant");
    std::thread stopper([&] { http_->stop(); });
    const std::string said = client.read_until("stopping");
    EXPECT_NE(said.find(R"("code":"stopping")"), std::string::npos) << said;
    EXPECT_TRUE(idle.is_closed_within(10s));
    EXPECT_TRUE(half.is_closed_within(10s));
    stopper.join();
    stop();
  }
}

TEST_F(Http, TheLogSaysWhatARequestCostAndNotWhatItSaid) {
  const Lines lines;
  start();
  const int n_prompt = chat()["usage"]["prompt_tokens"];
  chat();
  ask("POST", "/v1/chat/completions", kHelloStreamed);
  ask("GET", "/health");
  executor_->fail_wait[static_cast<int>(executor_->steps().size())] = "the device stumbled";
  ask("POST", "/v1/chat/completions", kHelloStreamed);
  stop();
  const std::string log = lines.all();
  EXPECT_THAT(log, testing::ContainsRegex(fmt::format(
                       "127.0.0.1 POST /v1/chat/completions 200 [0-9]+ ms, prompt {} \\(0 cached\\), "
                       "[0-9]+ new, stop\n",
                       n_prompt)));
  EXPECT_THAT(log, testing::ContainsRegex(
                       fmt::format("200 [0-9]+ ms, prompt {} \\([1-9][0-9]* cached\\)", n_prompt)));
  EXPECT_THAT(log, testing::ContainsRegex("GET /health 200 [0-9]+ ms\n"));
  EXPECT_THAT(log, testing::ContainsRegex("POST /v1/chat/completions 200 [0-9]+ ms, failed\n"));
  EXPECT_EQ(log.find("hello"), std::string::npos) << log;
  EXPECT_EQ(log.find("four"), std::string::npos) << log;
}

TEST_F(Http, AnIgnoredFieldIsLoggedOnce) {
  const Lines lines;
  start();
  for (const char* more : {R"("oddity": 1, )", R"("oddity": 2, "novelty": 1, )"})
    ask("POST", "/v1/chat/completions", "{" + (more + std::string(kHello).substr(1)));
  stop();
  const std::string log = lines.all();
  EXPECT_THAT(log, testing::HasSubstr("ignored: oddity\n"));
  EXPECT_THAT(log, testing::HasSubstr("ignored: novelty\n"));
}

TEST_F(Http, AFailedStreamCountsAsAFailure) {
  start();
  const auto counts = [&](const std::string& result, int n) {
    return eventually([&] {
      return service_->metrics().find(fmt::format("lily_http_requests_total{{result=\"{}\"}} {}\n", result,
                                                  n)) != std::string::npos;
    });
  };
  chat();
  EXPECT_TRUE(counts("ok", 1));
  executor_->fail_wait[static_cast<int>(executor_->steps().size())] = "the device stumbled";
  ask("POST", "/v1/chat/completions", kHelloStreamed);
  EXPECT_TRUE(counts("failed", 1));
  EXPECT_TRUE(counts("ok", 1));
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

TEST_F(Http, ManyClientsAtOnceAreAllAnswered) {
  start({}, {}, {.queue_capacity = 1000});
  std::atomic<int> n_answered = 0, n_left = 0;
  std::vector<std::thread> clients;
  for (int c = 0; c < 16; ++c)
    clients.emplace_back([&, c] {
      std::mt19937 random(static_cast<uint32_t>(c));
      for (int i = 0; i < 12; ++i) {
        Connection client(port_);
        switch (random() % 4) {
          case 0:
            client.send("garbage\r\n\r\n");
            break;
          case 1:  // leaves
            client.post("/v1/chat/completions", kHelloStreamed);
            if (random() % 2 == 0) client.read_until("one");
            ++n_left;
            break;
          default: {
            client.post("/v1/chat/completions", random() % 2 == 0 ? kHello : kHelloStreamed);
            const auto reply = client.read();
            ASSERT_TRUE(reply);
            EXPECT_EQ(reply->status, 200);
            EXPECT_NE(reply->body.find("four"), std::string::npos);
            ++n_answered;
          }
        }
      }
    });
  for (std::thread& client : clients) client.join();
  EXPECT_GT(n_answered, 50);
  EXPECT_GT(n_left, 10);
  EXPECT_TRUE(eventually([&] { return assistant_->engine().stats().n_running == 0; }));
  expect_alive();
}

}  // namespace
}  // namespace lily::test
