// Clients that misbehave: requests that are broken, too long, too slow or mean two things.
#include <atomic>
#include <random>

#include "tests/server/scripted_server.h"

namespace lily::test {
namespace {

using server::Json;
using namespace std::chrono_literals;

class HttpBadClients : public ScriptedServer {};

TEST_F(HttpBadClients, DeepJsonIsRefused) {
  start();
  for (const char bracket : {'[', '{'}) {
    std::string body;
    for (int i = 0; i < 100000; ++i) body += bracket == '[' ? "[" : "{\"a\":";
    EXPECT_EQ(ask("POST", "/v1/chat/completions", body).status, 400);
  }
  expect_alive();
}

// Depth inside a string is not that of the body.
TEST_F(HttpBadClients, DeepArgumentsOfACallAreHarmless) {
  start();
  const std::string deep = "{\"a\": " + std::string(300'000, '[') + std::string(300'000, ']') + "}";
  const Json body = {
      {"messages",
       {{{"role", "user"}, {"content", "q"}},
        {{"role", "assistant"}, {"tool_calls", {{{"function", {{"name", "f"}, {"arguments", deep}}}}}}},
        {{"role", "tool"}, {"content", "r"}}}}};
  EXPECT_EQ(ask("POST", "/v1/chat/completions", body.dump()).status, 400) << "longer than the context";
  EXPECT_EQ(ask("POST", "/apply-template", body.dump()).status, 200);
  expect_alive();
}

TEST_F(HttpBadClients, ATooLongBodyIs413) {
  start();
  Connection client(port_);
  client.send(
      "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n{");
  const auto reply = client.read();
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->status, 413);
  expect_alive();
}

TEST_F(HttpBadClients, ATooLongBodyInChunksIs413) {
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

TEST_F(HttpBadClients, ABodyThatIsPackedIsRefusedByTheNameOfItsEncoding) {
  start();
  HttpReply reply = ask("POST", "/v1/chat/completions", "\x1f\x8b", "Content-Encoding: gzip\r\n");
  EXPECT_EQ(reply.status, 415);
  EXPECT_NE(reply.body.find("'gzip'"), std::string::npos) << reply.body;
  reply = ask("GET", "/v1/models", {}, "Range: bytes=5-2\r\n");
  EXPECT_EQ(reply.status, 416);
  EXPECT_NE(reply.body.find("Range"), std::string::npos) << reply.body;
  expect_alive();
}

TEST_F(HttpBadClients, AFormIsNoRequest) {
  start();
  const HttpReply reply = ask("POST", "/v1/chat/completions", "--x\r\n\r\n{}\r\n--x--\r\n",
                              "Content-Type: multipart/form-data; boundary=x\r\n");
  EXPECT_EQ(reply.status, 400);
  EXPECT_NE(reply.body.find("not a form"), std::string::npos) << reply.body;
  expect_alive();
}

TEST_F(HttpBadClients, GarbageAndTruncationLeaveTheServerAlive) {
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
    if (!reply) continue;
    EXPECT_GE(reply->status, 400) << bytes.substr(0, 80);
    EXPECT_TRUE(json_of(*reply)["error"]["message"].is_string()) << reply->body;
  }
  {
    Connection client(port_);  // the body never comes
    client.send("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{\"mes");
  }
  expect_alive();
}

TEST_F(HttpBadClients, ManyHeadersLeaveTheServerAlive) {
  start();
  Connection client(port_);
  client.send("GET /health HTTP/1.1\r\n");
  for (int i = 0; i < 20000; ++i)
    if (!client.send("X-" + std::to_string(i) + ": y\r\n")) break;
  client.send("\r\n");
  client.read(3s);
  expect_alive();
}

TEST_F(HttpBadClients, ASlowSenderIsDropped) {
  start({.read_timeout_s = 1});
  Connection client(port_);
  client.send("GET /heal");
  EXPECT_TRUE(client.is_closed_within(5s));
  expect_alive();
}

// A byte from time to time holds a thread for a bounded time only, in the head as in the body.
TEST_F(HttpBadClients, ARequestByteByByteIsDroppedWhenItTakesTooLong) {
  const std::pair<server::HttpOptions, std::string> cases[] = {
      {{.head_timeout_s = 1, .body_timeout_s = 600}, "GET /health HTTP/1.1\r\nX: "},
      {{.head_timeout_s = 600, .body_timeout_s = 1},
       "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"},
      {{.head_timeout_s = 600, .body_timeout_s = 1},
       "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nfff\r\n"}};
  for (const auto& [options, beginning] : cases) {
    start(options);
    Connection client(port_);
    client.send(beginning);
    EXPECT_TRUE(eventually([&] {
      client.send("a");
      return client.is_closed_within(10ms);
    })) << beginning;
    expect_alive();
    stop();
  }
}

// More of them than there are threads.
TEST_F(HttpBadClients, ConnectionsThatSayNothingMakeRoomForOthers) {
  start({.read_timeout_s = 600, .head_timeout_s = 600, .keep_alive_s = 600});
  std::vector<std::unique_ptr<Connection>> silent;
  for (int i = 0; i < 40; ++i) {
    silent.push_back(std::make_unique<Connection>(port_));
    if (i % 2 == 0) silent.back()->send("GET /hea");
  }
  expect_alive();
  // Who has a request is served, however many are silent.
  executor_->hold();
  Connection client(port_);
  client.post("/v1/chat/completions", kHelloStreamed);
  client.read_until("assistant");
  for (int i = 0; i < 40; ++i) silent.push_back(std::make_unique<Connection>(port_));
  EXPECT_TRUE(silent.front()->is_closed_within(5s));
  executor_->allow(-1);
  EXPECT_NE(client.read_until("[DONE]").find("four"), std::string::npos);
}

TEST_F(HttpBadClients, ARequestThatWaitsForAThreadIsNotLate) {
  start({.n_threads = 2, .head_timeout_s = 1, .body_timeout_s = 1});
  executor_->hold();
  Connection first(port_), second(port_), third(port_);
  for (Connection* client : {&first, &second}) {
    client->post("/v1/chat/completions", kHelloStreamed);
    client->read_until("assistant");
  }
  third.post("/v1/chat/completions", kHelloStreamed);
  std::this_thread::sleep_for(2500ms);  // the connections are looked at every second
  executor_->allow(-1);
  for (Connection* client : {&first, &second, &third})
    EXPECT_NE(client->read_until("[DONE]").find("four"), std::string::npos);
}

TEST_F(HttpBadClients, ALongAnswerIsNotALateRequest) {
  start({.head_timeout_s = 1, .body_timeout_s = 1});
  executor_->hold();
  Connection client(port_);
  client.post("/v1/chat/completions", kHelloStreamed);
  executor_->await_held();
  std::this_thread::sleep_for(2500ms);  // the connections are looked at every second
  executor_->allow(-1);
  EXPECT_NE(client.read_until("[DONE]").find("four"), std::string::npos);
}

TEST_F(HttpBadClients, OfRequestsInOneGoTheFirstIsAnsweredAndTheConnectionCloses) {
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

TEST_F(HttpBadClients, ManyClientsAtOnceAreAllAnswered) {
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
