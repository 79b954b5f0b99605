// Who may call the server, over a socket: keys, origins, names of this machine, addresses to listen on.
#include <fmt/format.h>

#include "tests/server/scripted_server.h"

namespace lily::test {
namespace {

using server::Json;
using namespace std::chrono_literals;

class HttpAccess : public ScriptedServer {
 protected:
  // False on machines without it.
  bool can_listen_on_ipv6() const {
    try {
      server::HttpServer({.host = "::1", .port = 0, .n_threads = 1}).bind();
      return true;
    } catch (const Error&) {
      return false;
    }
  }
};

TEST_F(HttpAccess, AKeyIsAskedFor) {
  start({.api_key = "secret"});
  const HttpReply without = ask("POST", "/v1/chat/completions", kHello);
  EXPECT_EQ(without.status, 401);
  EXPECT_EQ(json_of(without)["error"]["code"], "invalid_api_key");
  for (const char* wrong : {"Authorization: Bearer secre\r\n", "Authorization: Bearer secrets\r\n",
                            "Authorization: secret\r\n", "x-api-key: \r\n"})
    EXPECT_EQ(ask("POST", "/v1/chat/completions", kHello, wrong).status, 401) << wrong;
  EXPECT_EQ(ask("POST", "/v1/chat/completions", kHello, "Authorization: Bearer secret\r\n").status, 200);
  EXPECT_EQ(ask("POST", "/v1/chat/completions", kHello, "authorization: bearer secret\r\n").status, 200);
  EXPECT_EQ(ask("POST", "/v1/chat/completions", kHello, "x-api-key: secret\r\n").status, 200);
  EXPECT_EQ(ask("GET", "/health").status, 200);
}

TEST_F(HttpAccess, RefusalsHaveTheShapeOfTheirFamily) {
  start({.api_key = "secret", .max_body_bytes = 1000});
  const std::string key = "x-api-key: secret\r\n";
  const struct {
    const char *method, *path;
    std::string body, headers;
    int status;
    const char* type;
  } cases[] = {
      {"POST", "/v1/messages", "{}", "", 401, "authentication_error"},
      {"POST", "/v1/messages", "{}", key, 400, "invalid_request_error"},
      {"GET", "/v1/messages", "", key, 405, "not_found_error"},
      {"POST", "/v1/messages/nope", "{}", key, 404, "not_found_error"},
      {"POST", "/v1/messages", std::string(2000, ' '), key, 413, "request_too_large"},
      {"POST", "/v1/messages", "{}", key + "Origin: http://evil.example\r\n", 403, "permission_error"}};
  for (const auto& c : cases) {
    for (const bool is_anthropic : {true, false}) {
      std::string path = c.path;
      if (!is_anthropic) path.replace(path.find("messages"), 8, "chat/completions");
      const HttpReply reply = ask(c.method, path, c.body, c.headers);
      EXPECT_EQ(reply.status, c.status) << path;
      const Json json = json_of(reply);
      EXPECT_EQ(json["error"]["type"], c.type) << reply.body;
      EXPECT_TRUE(json["error"]["message"].is_string()) << reply.body;
      EXPECT_EQ(json["error"].contains("param"), !is_anthropic) << reply.body;
      EXPECT_EQ(json["error"].contains("code"), !is_anthropic) << reply.body;
      if (!is_anthropic) continue;
      EXPECT_EQ(json["type"], "error") << reply.body;
      EXPECT_EQ(json["request_id"], reply.headers.at("x-request-id"));
    }
  }
}

TEST_F(HttpAccess, PagesOfOtherSitesAreRefused) {
  start();
  EXPECT_EQ(ask("POST", "/v1/chat/completions", kHello, "Origin: http://evil.example\r\n").status, 403);
  EXPECT_EQ(ask("POST", "/v1/chat/completions", kHello, "Origin: http://localhost\r\n").status, 200);
}

TEST_F(HttpAccess, ANameThatWasMadeToPointHereIsRefused) {
  start();
  for (const char* path : {"/v1/models", "/health", "/"}) {
    Connection client(port_);
    client.send(
        fmt::format("GET {} HTTP/1.1\r\nHost: evil.example:{}\r\nOrigin: http://evil.example:{}\r\n\r\n",
                    path, port_, port_));
    EXPECT_EQ(client.read()->status, 403) << path;
  }
  // Whoever owns a name that begins like an address may let it point here.
  for (const char* host :
       {"127.evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", "", "["}) {
    Connection client(port_);
    client.send(fmt::format("GET /v1/models HTTP/1.1\r\nHost: {0}\r\nOrigin: http://{0}\r\n\r\n", host));
    EXPECT_EQ(client.read()->status, 403) << host;
  }
  for (const char* host : {"localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:80"}) {
    Connection client(port_);
    client.send(fmt::format("GET /v1/models HTTP/1.1\r\nHost: {}\r\n\r\n", host));
    EXPECT_EQ(client.read()->status, 200) << host;
  }
}

TEST_F(HttpAccess, AnOriginCanBeAllowed) {
  start({.cors = "http://page.example"});
  const HttpReply reply = ask("POST", "/v1/chat/completions", kHello, "Origin: http://page.example\r\n");
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(reply.headers.at("access-control-allow-origin"), "http://page.example");
  EXPECT_EQ(ask("OPTIONS", "/v1/chat/completions", {}, "Origin: http://page.example\r\n").status, 204);
  EXPECT_EQ(ask("POST", "/v1/chat/completions", kHello, "Origin: http://other.example\r\n").status, 403);
}

TEST_F(HttpAccess, AQuestionOfAPageOfAnotherSiteIsToldWhy) {
  start();
  const HttpReply reply = ask("OPTIONS", "/v1/chat/completions", {}, "Origin: http://evil.example\r\n");
  EXPECT_EQ(reply.status, 403);
  EXPECT_EQ(json_of(reply)["error"]["code"], "origin") << reply.body;
  EXPECT_FALSE(reply.headers.contains("access-control-allow-origin"));
}

TEST_F(HttpAccess, ListensOnIPv6) {
  if (!can_listen_on_ipv6()) GTEST_SKIP() << "this machine has no IPv6";
  start({.host = "::1"});
  const auto answer_to = [&](const std::string& host) {
    Connection client(port_, "::1");
    client.send(fmt::format("POST /v1/chat/completions HTTP/1.1\r\nHost: {}\r\nContent-Length: {}\r\n\r\n{}",
                            host, std::string(kHello).size(), kHello));
    return client.read().value_or(HttpReply{});
  };
  EXPECT_EQ(json_of(answer_to(fmt::format("[::1]:{}", port_)))["choices"][0]["message"]["content"], says_);
  EXPECT_EQ(answer_to("evil.example").status, 403);
  // Its connections are watched like others: a client that leaves is noticed, one that is slow is dropped.
  executor_->hold();
  {
    Connection client(port_, "::1");
    client.post("/v1/chat/completions", kHelloStreamed);
    executor_->await_held();
  }
  EXPECT_TRUE(
      eventually([&] { return service_->metrics().find("clients_left_total 1") != std::string::npos; }));
  executor_->allow(-1);
}

TEST_F(HttpAccess, AnIPv6ClientThatIsSlowIsDropped) {
  if (!can_listen_on_ipv6()) GTEST_SKIP() << "this machine has no IPv6";
  start({.host = "::1", .head_timeout_s = 1});
  Connection client(port_, "::1");
  client.send("GET /health HTTP/1.1\r\nX: ");
  EXPECT_TRUE(eventually([&] {
    client.send("a");
    return client.is_closed_within(10ms);
  }));
}

}  // namespace
}  // namespace lily::test
