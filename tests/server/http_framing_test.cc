// Where a request ends: heads that can be read in two ways, bodies that nobody reads, parts of answers.
#include <fmt/format.h>

#include "tests/server/scripted_server.h"

namespace lily::test {
namespace {

using namespace std::chrono_literals;

class HttpFraming : public ScriptedServer {
 protected:
  // All statuses that come for these bytes until the connection ends, or nothing more comes.
  std::vector<int> statuses_of(const std::vector<std::string>& parts) {
    Connection client(port_);
    std::vector<int> statuses;
    for (const std::string& part : parts) {
      client.send(part);
      if (const auto reply = client.read(2s)) statuses.push_back(reply->status);
    }
    return statuses;
  }
};

constexpr const char* kPost = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n";
constexpr const char* kSmuggled = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n";

TEST_F(HttpFraming, AHeadThatCanBeReadInTwoWaysIs400AndTheConnectionEnds) {
  start();
  for (const char* head :
       {"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n", "Content-Length: 4\r\nContent-Length: 5\r\n",
        "Transfer-Encoding: gzip, chunked\r\n", "Transfer-Encoding: identity\r\nContent-Length: 4\r\n",
        "Content-Length: +4\r\n", "Content-Length: 4, 4\r\n", "Content-Length: 0x4\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", "Content-Length : 4\r\n",
        "X: a\r\n Content-Length: 4\r\n", "Host: evil.example\r\nContent-Length: 4\r\n"}) {
    Connection client(port_);
    client.send(std::string(kPost) + head + "\r\n0\r\n\r\n");
    const auto reply = client.read();
    ASSERT_TRUE(reply) << head;
    EXPECT_EQ(reply->status, 400) << head;
    EXPECT_NE(reply->body.find("in two ways"), std::string::npos) << reply->body;
    client.send(kSmuggled);
    EXPECT_TRUE(client.is_closed_within(5s)) << head;
  }
  expect_alive();
}

// A body that was not read must not be taken for requests.
TEST_F(HttpFraming, ABodyThatNobodyReadIsNoRequest) {
  const std::string body = std::string(20000, ' ') + kSmuggled;  // more than the HTTP library reads ahead
  const std::string length = fmt::format("Content-Length: {}\r\n\r\n", body.size());
  start({.api_key = "secret"});
  EXPECT_EQ(statuses_of({kPost + length, body}), (std::vector<int>{401}));
  EXPECT_EQ(statuses_of({"GET /health HTTP/1.1\r\nHost: localhost\r\n" + length, body}),
            (std::vector<int>{200}));
  EXPECT_EQ(statuses_of({"OPTIONS /v1/models HTTP/1.1\r\nHost: localhost\r\n" + length, body}),
            (std::vector<int>{204}));
  stop();
  is_loaded_ = false;
  start();
  EXPECT_EQ(statuses_of({kPost + length, body}), (std::vector<int>{503}));
}

TEST_F(HttpFraming, AfterWhatIsNoRequestTheConnectionIsToEnd) {
  start();
  for (const char* garbage :
       {"PRI * HTTP/2.0\r\n\r\n", "get /health HTTP/1.1\r\n\r\n", "\x16\x03\x01\x02\r\n\r\n"}) {
    Connection client(port_);
    client.send(garbage);
    const auto reply = client.read();
    ASSERT_TRUE(reply) << garbage;
    EXPECT_EQ(reply->status, 400) << garbage;
    EXPECT_EQ(reply->headers.at("connection"), "close") << garbage;
  }
}

// Sizes of chunks are read in more ways than one.
TEST_F(HttpFraming, AfterABodyInChunksTheConnectionEnds) {
  start();
  Connection client(port_);
  client.send(
      "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
      "10\r\n{\"content\":\"ab\"}\r\n0\r\n\r\n");
  const auto reply = client.read();
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->status, 200);
  EXPECT_EQ(reply->headers.at("connection"), "close");
  EXPECT_TRUE(client.is_closed_within(5s));
}

TEST_F(HttpFraming, WithoutALengthThereIsNoBodyToWaitFor) {
  start({.read_timeout_s = 60});
  Connection client(port_);
  client.send("DELETE /cache HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_EQ(client.read(5s)->status, 200);
  client.post("/v1/chat/completions", kHello);  // on the same connection: nothing is left over
  EXPECT_EQ(client.read()->status, 200);
  // Where a body is usual, its length may have stood in a line that the HTTP library drops without a word
  // (one that ends in a line feed alone): what follows the head is not taken for a request.
  for (const std::string& head : {std::string(kPost), std::string(kPost) + "Content-Length: 44\nX: y\r\n"}) {
    Connection lost(port_);
    lost.send(head + "\r\n");
    EXPECT_EQ(lost.read(5s)->status, 400);
    EXPECT_TRUE(lost.is_closed_within(5s));
  }
  Connection put(port_);
  put.send("PUT /cache HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_EQ(put.read(5s)->status, 405);
}

TEST_F(HttpFraming, AnAnswerIsWholeWhateverPartIsAskedFor) {
  start();
  const std::string whole = ask("GET", "/openapi.json").body;
  std::string many = "Range: bytes=0-";
  while (many.size() < 8000) many += ",0-";
  for (const std::string& range : {std::string("Range: bytes=5-9"), many}) {
    const HttpReply reply = ask("GET", "/openapi.json", {}, range + "\r\n");
    EXPECT_EQ(reply.status, 200);
    EXPECT_EQ(reply.body, whole);
  }
  EXPECT_EQ(json_of(ask("POST", "/v1/chat/completions", kHello, "Range: bytes=0-3\r\n"))["object"],
            "chat.completion");
}

TEST_F(HttpFraming, HeadIsTheHeadOfGet) {
  start();
  for (const char* path :
       {"/health", "/v1/models", "/v1/models/lily-tiny", "/metrics", "/cache", "/openapi.json", "/"}) {
    Connection client(port_);
    client.request("GET", path);
    const auto got = client.read();
    ASSERT_TRUE(got) << path;
    client.request("HEAD", path);
    const std::string head = client.read_until("\r\n\r\n");
    EXPECT_TRUE(head.starts_with(fmt::format("HTTP/1.1 {} ", got->status))) << head;
    EXPECT_TRUE(head.ends_with("\r\n\r\n")) << "no body: " << head;
    if (std::string(path) != "/metrics") {  // which has just changed
      EXPECT_NE(head.find("Content-Length: " + got->headers.at("content-length")), std::string::npos) << head;
    }
  }
  Connection client(port_);
  client.request("HEAD", "/nope");
  EXPECT_TRUE(client.read_until("\r\n\r\n").starts_with("HTTP/1.1 404 "));
  Connection other(port_);
  other.request("HEAD", "/v1/chat/completions");
  EXPECT_TRUE(other.read_until("\r\n\r\n").starts_with("HTTP/1.1 405 "));
}

}  // namespace
}  // namespace lily::test
