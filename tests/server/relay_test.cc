// Requests that another engine answers: a second server of this kind, and servers that do everything wrong.
#include <fmt/format.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <future>

#include "tests/server/log_lines.h"
#include "tests/server/raw_server.h"
#include "tests/server/scripted_server.h"
#include "tests/support/temp_folder.h"

namespace lily::test {
namespace {

using server::Json;
using namespace std::chrono_literals;
using Exchange = RawServer::Exchange;

// The engine that requests go to.
class Back : public ScriptedServer {
 public:
  using ScriptedServer::eventually;
  using ScriptedServer::executor_;
  using ScriptedServer::says_;
  using ScriptedServer::service_;
  using ScriptedServer::start;
  std::string url() const { return "http://127.0.0.1:" + std::to_string(port_); }
  // Once nothing runs.
  engine::EngineStats stats() const {
    EXPECT_TRUE(eventually([&] { return assistant_->engine().stats().n_running == 0; }));
    return assistant_->engine().stats();
  }

 private:
  void TestBody() override {}
};

Json request(const std::string& model, bool stream = false) {
  return {{"model", model},
          {"messages", {{{"role", "user"}, {"content", "a secret prompt"}}}},
          {"temperature", 0},
          {"reasoning_effort", "none"},
          {"stream", stream}};
}

// The three shapes of errors, each with a request that gets them.
struct Case {
  const char* path;
  Json body;
};
std::vector<Case> cases(bool stream) {
  Json messages = request("big", stream), responses = {{"model", "big"},
                                                       {"input", "hi"},
                                                       {"temperature", 0},
                                                       {"reasoning", {{"effort", "none"}}},
                                                       {"stream", stream}};
  messages.erase("reasoning_effort");
  messages["max_tokens"] = 50;
  return {{"/v1/chat/completions", request("big", stream)},
          {"/v1/messages", messages},
          {"/v1/responses", responses}};
}

class Relays : public ScriptedServer {
 protected:
  // The connections that are kept open to the other engine end first: it would wait for them.
  ~Relays() override { end(); }
  void end() {
    stop();
    service_.reset();
    back_.reset();
  }
  Back& start_back(const std::string& says = "one two three four") {
    back_ = std::make_unique<Back>();
    back_->says_ = says;
    back_->start();
    return *back_;
  }
  void pass_to(const std::string& url, server::ServiceOptions options = {}, const std::string& key = "") {
    server::Upstream upstream = server::parse_upstream("big=" + url);
    upstream.key = key;
    options.upstreams.upstreams = {upstream};
    start({}, std::move(options));
  }
  HttpReply ask_big(bool stream = false) {
    return ask("POST", "/v1/chat/completions", request("big", stream).dump());
  }
  // In the shape of its API, on one line, with this code where the shape has one.
  static void expect_error(const HttpReply& reply, int status, const std::string& code, const char* path) {
    EXPECT_EQ(reply.status, status) << path << reply.body;
    const Json json = Json::parse(reply.body, nullptr, false);
    ASSERT_FALSE(json.is_discarded()) << reply.body;
    if (std::string(path) == "/v1/messages") EXPECT_EQ(json["type"], "error");
    else EXPECT_EQ(json["error"]["code"], code) << reply.body;
    EXPECT_EQ(json["error"]["message"].get<std::string>().find('\n'), std::string::npos);
    EXPECT_NE(json["error"]["message"].get<std::string>().find("upstream big"), std::string::npos)
        << reply.body;
  }
  bool counts(const char* result, int n) {
    return eventually([&] {
      return service_->metrics().find(fmt::format("upstream=\"big\",result=\"{}\"}} {}\n", result, n)) !=
             std::string::npos;
    });
  }

  std::unique_ptr<Back> back_;
};

TEST_F(Relays, EachApiIsAnsweredByTheOtherEngine) {
  Back& back = start_back("from the other side");
  pass_to(back.url());
  for (const Case& c : cases(false)) {
    const HttpReply reply = ask("POST", c.path, c.body.dump());
    EXPECT_EQ(reply.status, 200) << reply.body;
    EXPECT_NE(reply.body.find(back.says_), std::string::npos) << reply.body;
    EXPECT_EQ(Json::parse(reply.body)["model"], "big");
  }
  const Json text = Json::parse(ask("POST", "/completions", R"({"model": "big", "prompt": "x"})").body);
  EXPECT_EQ(text["object"], "text_completion");
  const Json count = {{"model", "big"}, {"messages", {{{"role", "user"}, {"content", "hello"}}}}};
  EXPECT_GT(
      Json::parse(ask("POST", "/v1/messages/count_tokens?beta=true", count.dump()).body)["input_tokens"], 3);
  EXPECT_EQ(assistant_->engine().stats().n_requests, 0);
  EXPECT_TRUE(counts("ok", 5));
  expect_alive();  // the model that is here
  EXPECT_EQ(assistant_->engine().stats().n_requests, 1);
}

TEST_F(Relays, StreamsOfEachApiArriveWithTheirEnds) {
  pass_to(start_back("uno due tre").url());
  const std::vector<std::string> ends = {"data: [DONE]\n\n", "\"type\":\"message_stop\"}\n\n",
                                         "response.completed"};
  for (size_t i = 0; const Case& c : cases(true)) {
    const HttpReply reply = ask("POST", c.path, c.body.dump());
    EXPECT_EQ(reply.headers.at("content-type"), "text/event-stream");
    EXPECT_EQ(reply.headers.at("cache-control"), "no-cache");
    EXPECT_NE(reply.body.find("due"), std::string::npos) << reply.body;
    EXPECT_NE(reply.body.find(ends[i++]), std::string::npos) << reply.body;
  }
  EXPECT_TRUE(counts("ok", 3));
}

TEST_F(Relays, TokensOfTheOtherEngineAreCounted) {
  for (const bool stream : {false, true}) {
    Back& back = start_back("uno due tre");
    pass_to(back.url());
    // Chat completions tell the usage in a stream only where it is asked for.
    std::vector<Case> all = cases(stream);
    if (stream) all[0].body["stream_options"]["include_usage"] = true;
    for (const Case& c : all) EXPECT_EQ(ask("POST", c.path, c.body.dump()).status, 200);
    EXPECT_TRUE(counts("ok", 3));
    const engine::EngineStats there = back.stats();
    EXPECT_GT(there.cached_tokens, 0);
    for (const auto& [name, n] : {std::pair("prompt", there.prompt_tokens),
                                  {"cached", there.cached_tokens},
                                  {"completion", there.completion_tokens}})
      EXPECT_NE(service_->metrics().find(
                    fmt::format("lily_upstream_{}_tokens_total{{upstream=\"big\"}} {}\n", name, n)),
                std::string::npos)
          << n << " in " << service_->metrics();
    end();
  }
}

TEST_F(Relays, ToolsAreCalledThroughIt) {
  pass_to(start_back(
              "<tool_call>\n<function=ls>\n<parameter=path>\n/tmp\n</parameter>\n</function>\n</tool_call>")
              .url());
  for (const bool stream : {false, true}) {
    Json body = request("big", stream);
    body["tools"] = Json::parse(R"([{"type": "function", "function": {"name": "ls", "parameters":
        {"type": "object", "properties": {"path": {"type": "string"}}}}}])");
    const HttpReply reply = ask("POST", "/v1/chat/completions", body.dump());
    EXPECT_NE(reply.body.find(R"("name":"ls")"), std::string::npos) << reply.body;
    EXPECT_NE(reply.body.find(R"("finish_reason":"tool_calls")"), std::string::npos) << reply.body;
    if (!stream)
      EXPECT_EQ(Json::parse(reply.body)["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"],
                R"({"path": "/tmp"})");
  }
}

TEST_F(Relays, BytesArriveWhenTheyComeAndAsTheyAre) {
  // A character of three bytes in two pieces, an odd line end, two events in one piece.
  const std::vector<std::string> pieces = {"data: {\"a\": \"\xe2\x82", "\xac\"}\r\n\r\n: note\n\n",
                                           "event: x\ndata:  1\n\ndata: 2\n\n"};
  std::promise<void> seen[2];
  RawServer back([&](const Exchange& exchange) {
    exchange.send(kStreamHead);
    for (size_t i = 0; i < pieces.size(); ++i) {
      exchange.send(pieces[i]);
      if (i < 2) seen[i].get_future().wait_for(10s);
    }
  });
  pass_to(back.url());
  Connection client(port_);
  client.post("/v1/chat/completions", request("big", true).dump());
  EXPECT_NE(client.read_until("\xe2\x82").find("\xe2\x82"), std::string::npos);
  seen[0].set_value();
  EXPECT_NE(client.read_until(": note\n\n").find(": note\n\n"), std::string::npos);
  seen[1].set_value();
  EXPECT_EQ(client.read()->body, pieces[0] + pieces[1] + pieces[2]);
}

TEST_F(Relays, TheRequestGoesOnAsItIsButForWhatIsSecret) {
  RawServer back(http_answer("{}"));
  pass_to(back.url(), {}, "sk-right");
  // Numbers and spaces that no writer of JSON would repeat.
  const std::string body = "{ \"model\":\"big\" ,\"x\": 1.0e+2, \"y\": 123456789012345678901234567890}";
  const HttpReply reply =
      ask("POST", "/v1/messages?beta=true", body,
          "Authorization: Bearer mine\r\nx-api-key: mine\r\nCookie: mine\r\nX-Forwarded-For: mine\r\n"
          "anthropic-version: 2023-06-01\r\nAccept-Encoding: gzip\r\nVia: 1.0 fred\r\n");
  EXPECT_EQ(reply.status, 200) << reply.body;
  ASSERT_EQ(back.requests().size(), 1u);
  const std::string sent = back.requests()[0];
  EXPECT_TRUE(sent.starts_with("POST /v1/messages?beta=true HTTP/1.1\r\n")) << sent;
  EXPECT_EQ(sent.substr(sent.find("\r\n\r\n") + 4), body);
  EXPECT_NE(sent.find("Authorization: Bearer sk-right\r\n"), std::string::npos) << sent;
  EXPECT_NE(sent.find("anthropic-version: 2023-06-01\r\n"), std::string::npos) << sent;
  EXPECT_NE(sent.find("Via: 1.0 fred, 1.1 lily-"), std::string::npos) << sent;
  EXPECT_EQ(sent.find("mine"), std::string::npos) << sent;
  EXPECT_EQ(sent.find("gzip"), std::string::npos) << sent;
}

TEST_F(Relays, ANameBehindTheUpstreamsIsTheModelThere) {
  RawServer back(http_answer("{}"));
  pass_to(back.url());
  Json body = request("big/org/model");
  EXPECT_EQ(ask("POST", "/v1/chat/completions", body.dump()).status, 200);
  body["model"] = "org/model";
  ASSERT_EQ(back.requests().size(), 1u);
  EXPECT_EQ(Json::parse(back.requests()[0].substr(back.requests()[0].find("\r\n\r\n") + 4)), body);
}

TEST_F(Relays, TheListOfModelsHasIt) {
  pass_to("http://127.0.0.1:1");
  const Json list = Json::parse(ask("GET", "/v1/models").body)["data"];
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(list[0]["id"], "lily-tiny");
  EXPECT_EQ(list[1]["id"], "big");
  EXPECT_EQ(list[1]["owned_by"], "upstream");
  EXPECT_EQ(Json::parse(ask("GET", "/v1/models/big").body), list[1]);
  EXPECT_EQ(ask("GET", "/v1/models/small").status, 404);
}

TEST_F(Relays, AClientThatLeavesEndsTheRequestThere) {
  for (const bool stream : {false, true}) {
    Back& back = start_back();
    back.executor_->hold();
    pass_to(back.url());
    {
      Connection client(port_);
      client.post("/v1/chat/completions", request("big", stream).dump());
      back.executor_->await_held();
    }
    EXPECT_TRUE(back.eventually(
        [&] { return back.service_->metrics().find("clients_left_total 1") != std::string::npos; }));
    EXPECT_TRUE(counts("client_left", 1));
    end();
  }
}

TEST_F(Relays, AClientThatLeavesInMidStreamEndsItThere) {
  std::promise<bool> left;
  RawServer back([&](const Exchange& exchange) {
    exchange.send(kStreamHead);
    exchange.send("data: 1\n\n");
    left.set_value(exchange.is_left_within());
  });
  pass_to(back.url());
  {
    Connection client(port_);
    client.post("/v1/chat/completions", request("big", true).dump());
    client.read_until("data: 1");
  }
  EXPECT_TRUE(left.get_future().get());
}

TEST_F(Relays, AnEngineThatIsDownIsToldInEachShape) {
  const std::string url = start_back().url();
  back_.reset();
  pass_to(url);
  for (const bool stream : {false, true})
    for (const Case& c : cases(stream))
      expect_error(ask("POST", c.path, c.body.dump()), 502, "upstream_unreachable", c.path);
  EXPECT_TRUE(counts("failed", 6));
  expect_alive();
}

TEST_F(Relays, AConnectionThatIsNotMadeInTimeIsGivenUp) {
  RawServer back(http_answer("{}"));  // waits for the end of a request that never begins
  server::ServiceOptions options;
  options.upstreams.connect_timeout = 100ms;
  pass_to("https" + back.url().substr(4), options);
  expect_error(ask_big(), 504, "upstream_timeout", "/v1/chat/completions");
}

TEST_F(Relays, ACertificateThatNobodyTrustsGetsNoRequest) {
  TempFolder folder;
  const std::string key = (folder.path() / "key.pem").string(),
                    certificate = (folder.path() / "c.pem").string();
  if (std::system(fmt::format("openssl req -x509 -newkey rsa:2048 -nodes -keyout {} -out {} -days 2 -subj "
                              "/CN=localhost -addext subjectAltName=IP:127.0.0.1 >{}/log 2>&1",
                              key, certificate, folder.path().string())
                      .c_str()) != 0)
    GTEST_SKIP() << "no openssl";
  // Tells its process id, then its port.
  std::FILE* const tls = popen(fmt::format("echo $$; exec openssl s_server -www -accept 127.0.0.1:0 -cert {} "
                                           "-key {} </dev/null 2>&1",
                                           certificate, key)
                                   .c_str(),
                               "r");
  ASSERT_NE(tls, nullptr);
  std::string said;
  char line[4096];
  const auto read_line = [&] {
    if (std::fgets(line, sizeof line, tls) == nullptr) return false;
    said += line;
    return true;
  };
  while (said.find("ACCEPT 127.0.0.1:") == std::string::npos && read_line()) continue;
  const size_t address = said.find("127.0.0.1:");
  ASSERT_NE(address, std::string::npos) << said;
  pass_to("https://" + said.substr(address, said.find('\n', address) - address), {}, "sk-right");
  expect_error(ask_big(), 502, "upstream_not_trusted", "/v1/chat/completions");
  kill(std::stoi(said), SIGTERM);
  while (read_line()) continue;
  pclose(tls);
  EXPECT_EQ(said.find("sk-right"), std::string::npos) << said;
  EXPECT_EQ(said.find("secret prompt"), std::string::npos) << said;
}

TEST_F(Relays, AnEngineThatSaysNothingIsGivenUp) {
  RawServer back([](const Exchange& exchange) { exchange.is_left_within(); });
  pass_to(back.url(), {.step_timeout = 150ms});
  for (const Case& c : cases(false))
    expect_error(ask("POST", c.path, c.body.dump()), 504, "upstream_timeout", c.path);
}

TEST_F(Relays, ASlowStreamIsKeptAliveAndItsFailureToldInIt) {
  RawServer back([](const Exchange& exchange) { exchange.is_left_within(); });
  pass_to(back.url(), {.step_timeout = 400ms, .keep_alive = 20ms});
  for (const Case& c : cases(true)) {
    const HttpReply reply = ask("POST", c.path, c.body.dump());
    EXPECT_EQ(reply.status, 200);
    EXPECT_TRUE(reply.body.starts_with(": keep-alive\n\n")) << reply.body;
    const std::string last = reply.body.substr(reply.body.rfind("data: ") + 6);
    EXPECT_NE(last.find("has sent nothing"), std::string::npos) << reply.body;
    if (std::string(c.path) != "/v1/chat/completions")
      EXPECT_NE(reply.body.find("event: error\n"), std::string::npos);
    EXPECT_EQ(reply.body.find("[DONE]"), std::string::npos);
  }
}

TEST_F(Relays, ASilenceWithinAStreamIsFilledBetweenEventsOnly) {
  std::promise<void> seen;
  RawServer back([&](const Exchange& exchange) {
    exchange.send(kStreamHead);
    exchange.send("event: message_start\ndata: {}\n\n");
    seen.get_future().wait_for(10s);
    exchange.send("event: message_stop\ndata: {}");
    exchange.is_left_within(300ms);
    exchange.send("\n\n");
  });
  pass_to(back.url(), {.keep_alive = 20ms});
  Connection client(port_);
  client.post("/v1/messages", cases(true)[1].body.dump());
  EXPECT_NE(client.read_until("event: ping\n").find("event: ping\n"), std::string::npos);
  seen.set_value();
  EXPECT_TRUE(client.read()->body.find("event: message_stop\ndata: {}\n\n") != std::string::npos);
}

TEST_F(Relays, AnErrorThatComesLateIsAnEvent) {
  std::promise<void> seen;
  RawServer back([&](const Exchange& exchange) {
    seen.get_future().wait_for(10s);
    exchange.send(
        http_answer(R"({"error": {"message": "no room", "code": "full"}})", "application/json", "503 X"));
  });
  pass_to(back.url(), {.keep_alive = 20ms});
  Connection client(port_);
  client.post("/v1/chat/completions", request("big", true).dump());
  client.read_until(": keep-alive");
  seen.set_value();
  const std::string body = client.read()->body;
  EXPECT_TRUE(body.ends_with("data: {\"error\":{\"message\":\"no room\",\"code\":\"full\"}}\n\n")) << body;
}

TEST_F(Relays, NonsenseIsToldInEachShape) {
  const std::vector<std::string> nonsense = {
      "\x01\x02\x03 not HTTP at all\r\n\r\n",
      "",
      "HTTP/1.1 200 OK\r\n",
      "HTTP/1.1 200 OK\r\nContent-Length: 100\r\nContent-Type: application/json\r\n\r\n{\"a\"",
      "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
      http_answer("<html>welcome</html>", "text/html"),
      http_answer("", "application/json"),
      http_answer("[1, 2]", "application/json"),
      http_answer("{\"a\": }", "application/json"),
      http_answer("", "application/json", "204 No Content"),
      http_answer("{}", "application/json", "200 OK", "Content-Encoding: gzip\r\n"),
      http_answer("{}", "application/json", "700 What"),
      "HTTP/1.1 200 OK\r\nX-Long: " + std::string(90000, 'x') + "\r\nX-Long2: " + std::string(90000, 'x') +
          "\r\nX-Long3: " + std::string(90000, 'x') + "\r\n\r\n{}",
  };
  for (size_t i = 0; i < nonsense.size(); ++i) {
    SCOPED_TRACE(i);
    RawServer back(nonsense[i]);
    pass_to(back.url());
    for (const Case& c : cases(false)) {
      const HttpReply reply = ask("POST", c.path, c.body.dump());
      EXPECT_EQ(reply.status, 502) << reply.body;
      EXPECT_TRUE(Json::accept(reply.body)) << reply.body;
      EXPECT_NE(reply.body.find("upstream big"), std::string::npos) << reply.body;
      EXPECT_EQ(reply.body.find("<html>"), std::string::npos);
    }
    stop();
  }
}

TEST_F(Relays, WhatIsNoStreamIsToldWhereOneWasAskedFor) {
  for (const std::string& answer :
       {http_answer("{}", "application/json"), http_answer("", "text/event-stream"),
        http_answer("hello\n\n", "text/html")}) {
    RawServer back(answer);
    pass_to(back.url());
    const HttpReply reply = ask_big(true);
    EXPECT_NE(reply.body.find("upstream_bad_answer"), std::string::npos) << reply.body;
    stop();
  }
}

TEST_F(Relays, AStreamThatBreaksOffBetweenEventsEndsInAnError) {
  const std::string head =
      "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
  RawServer back(head + "9\r\ndata: 1\n\n\r\n");
  pass_to(back.url());
  const HttpReply reply = ask_big(true);
  EXPECT_TRUE(reply.body.starts_with("data: 1\n\ndata: {\"error\":")) << reply.body;
  EXPECT_NE(reply.body.find("upstream_broke_off"), std::string::npos) << reply.body;
}

TEST_F(Relays, AStreamThatBreaksOffWithinAnEventIsCut) {
  RawServer back(std::string(kStreamHead) + "data: 1\n\ndata: {\"half");
  pass_to(back.url());
  Connection client(port_);
  client.post("/v1/chat/completions", request("big", true).dump());
  const std::string got = client.read_until("this never comes");
  EXPECT_NE(got.find("{\"half"), std::string::npos);
  EXPECT_EQ(got.find("\r\n0\r\n\r\n"), std::string::npos) << "looks whole";
}

TEST_F(Relays, ARedirectIsNotFollowed) {
  RawServer other(http_answer("{}"));
  RawServer back(
      http_answer("", "text/plain", "307 Moved", "Location: " + other.url() + "/x?token=hidden\r\n"));
  pass_to(back.url(), {}, "sk-right");
  const HttpReply reply = ask_big();
  expect_error(reply, 502, "upstream_redirects", "/v1/chat/completions");
  EXPECT_NE(reply.body.find(other.url()), std::string::npos);
  EXPECT_EQ(reply.body.find("hidden"), std::string::npos);
  EXPECT_TRUE(other.requests().empty());
}

TEST_F(Relays, ErrorsOfTheOtherEngineArePassedOn) {
  const std::string body =
      R"({"error": {"message": "too long", "type": "x", "param": "messages", "code": 7}})";
  {
    RawServer back(
        http_answer(body, "application/json", "429 Slow", "Retry-After: 7\r\nSet-Cookie: a=b\r\n"));
    pass_to(back.url());
    const HttpReply reply = ask_big(true);
    EXPECT_EQ(reply.status, 429);
    EXPECT_EQ(reply.body, body);
    EXPECT_EQ(reply.headers.at("retry-after"), "7");
    EXPECT_FALSE(reply.headers.contains("set-cookie"));
    // In the shape that was asked for, though the engine has another one.
    const Json message = Json::parse(ask("POST", "/v1/messages", cases(false)[1].body.dump()).body);
    EXPECT_EQ(message["type"], "error");
    EXPECT_EQ(message["error"]["message"], "too long");
    EXPECT_EQ(message["error"]["type"], "rate_limit_error");
    stop();
  }
  for (const char* shape : {R"({"error": "too long"})", R"({"detail": "too long"})",
                            R"({"object": "error", "message": "too long", "code": 400})"}) {
    RawServer back(http_answer(shape, "application/json", "400 Bad"));
    pass_to(back.url());
    const HttpReply reply = ask_big();
    EXPECT_EQ(reply.status, 400);
    EXPECT_EQ(Json::parse(reply.body)["error"]["message"], "too long");
    stop();
  }
  RawServer back(http_answer("<html>Bad Gateway</html>", "text/html", "503 Bad"));
  pass_to(back.url());
  const HttpReply reply = ask_big();
  EXPECT_EQ(reply.status, 503);
  EXPECT_EQ(Json::parse(reply.body)["error"]["message"],
            "upstream big answers 503 with text/html and no message");
}

TEST_F(Relays, ARefusedKeyIsTheServersAndNotTheClients) {
  RawServer back(http_answer(R"({"error": {"message": "bad key sk-wrong"}})", "application/json", "401 No"));
  pass_to(back.url(), {}, "sk-wrong");
  const HttpReply reply = ask_big();
  expect_error(reply, 502, "upstream_refuses_key", "/v1/chat/completions");
  EXPECT_NE(reply.body.find("LILY_UPSTREAM_KEY_BIG"), std::string::npos);
  EXPECT_EQ(reply.body.find("sk-wrong"), std::string::npos);
}

TEST_F(Relays, HugeAnswers) {
  server::ServiceOptions options;
  options.upstreams.limits.max_body_bytes = 1000;
  const std::string padding(2'000'000, 'x');
  {
    RawServer back(http_answer("{\"a\": \"" + padding + "\"}"));
    pass_to(back.url(), options);
    expect_error(ask_big(), 502, "upstream_bad_answer", "/v1/chat/completions");
    stop();
  }
  {
    RawServer back(
        http_answer("{\"error\": {\"message\": \"" + padding + "\"}}", "application/json", "500 Oh"));
    pass_to(back.url(), options);
    const HttpReply reply = ask_big();
    EXPECT_EQ(reply.status, 500);
    EXPECT_LT(reply.body.size(), 4000u);
    stop();
  }
  RawServer back(kStreamHead + ("data: " + padding + "\n\n"));
  pass_to(back.url(), options);
  EXPECT_EQ(ask_big(true).body, "data: " + padding + "\n\n");
}

TEST_F(Relays, ARequestThatComesBackIsRefused) {
  // Passes on to the server what came from it, as a proxy would.
  RawServer mirror([this](const Exchange& exchange) {
    Connection connection(port_);
    connection.send(exchange.request());
    const auto reply = connection.read();
    if (reply)
      exchange.send(http_answer(reply->body, "application/json", std::to_string(reply->status) + " X"));
  });
  pass_to(mirror.url());
  const HttpReply reply = ask_big();
  EXPECT_EQ(reply.status, 508) << reply.body;
  EXPECT_EQ(Json::parse(reply.body)["error"]["code"], "upstream_loop");
  EXPECT_EQ(mirror.requests().size(), 1u);
}

TEST_F(Relays, NoLineOfTheLogHasContentOrKeys) {
  const LogLines log;
  for (const char* status : {"200 OK", "400 Bad", "500 Oh", "401 No"}) {
    RawServer back([&](const Exchange& exchange) {
      exchange.send(
          http_answer("{\"error\": {\"message\": \"cannot read: a secret prompt\"}", "text/plain", status));
    });
    pass_to(back.url(), {}, "sk-right");
    ask_big();
    ask_big(true);
    stop();
  }
  const std::string lines = log.all();
  EXPECT_NE(lines.find("/v1/chat/completions"), std::string::npos);
  EXPECT_EQ(lines.find("secret prompt"), std::string::npos) << lines;
  EXPECT_EQ(lines.find("sk-right"), std::string::npos) << lines;
}

}  // namespace
}  // namespace lily::test
