// Steps of the model that fail or hang, and the end of the server, as clients see them.
#include "tests/server/scripted_server.h"

namespace lily::test {
namespace {

using namespace std::chrono_literals;

class HttpFailure : public ScriptedServer {};

TEST_F(HttpFailure, StopsAlsoWhenItHasHardlyBegun) {
  for (int i = 0; i < 50; ++i) {
    server::HttpServer http({.port = 0, .n_threads = 1});
    const int port = http.bind();
    std::thread listener([&] { http.listen(); });
    http.stop();
    listener.join();
    EXPECT_THROW(Connection{port}, std::runtime_error);
  }
}

TEST_F(HttpFailure, APortHasOneServer) {
  server::HttpServer first({.port = 0, .n_threads = 1});
  const int port = first.bind();
  server::HttpServer second({.port = port, .n_threads = 1}), everywhere({.host = "0.0.0.0", .port = port});
  EXPECT_THROW(second.bind(), Error);
  EXPECT_THROW(everywhere.bind(), Error);
}

TEST_F(HttpFailure, AFailedStepFailsItsRequestAndTheNextOneWorks) {
  start();
  const size_t n_steps = executor_->steps().size();
  executor_->fail_wait[static_cast<int>(n_steps)] = "the device stumbled";
  const HttpReply reply = ask("POST", "/v1/chat/completions", kHello);
  EXPECT_EQ(reply.status, 500);
  EXPECT_NE(reply.body.find("the device stumbled"), std::string::npos);
  expect_alive();
}

TEST_F(HttpFailure, AFailureInAStreamIsToldWithoutDone) {
  start();
  executor_->fail_wait[2] = "the device stumbled";
  const HttpReply reply = ask("POST", "/v1/chat/completions", kHelloStreamed);
  EXPECT_EQ(reply.status, 200);
  EXPECT_NE(reply.body.find("\"error\":{\"message\":\"the device stumbled\""), std::string::npos)
      << reply.body;
  EXPECT_EQ(reply.body.find("[DONE]"), std::string::npos);
  expect_alive();
}

TEST_F(HttpFailure, AHungStepFailsItsRequest) {
  start({}, {.step_timeout = 200ms});
  executor_->hold();
  const HttpReply reply = ask("POST", "/v1/chat/completions", kHello);
  EXPECT_EQ(reply.status, 500);
  EXPECT_EQ(json_of(reply)["error"]["code"], "step_timeout");
  executor_->allow(-1);
  expect_alive();
}

TEST_F(HttpFailure, WaitingInTheQueueIsNotAHungStep) {
  struct Clock {  // the server's: it goes on when the test says so
    std::atomic<int> ms = 0;
    std::atomic<int64_t> n_looks = 0;
  };
  const auto clock = std::make_shared<Clock>();
  start({},
        {.step_timeout = 1s,
         .now =
             [clock] {
               ++clock->n_looks;
               return std::chrono::steady_clock::time_point(std::chrono::milliseconds(clock->ms.load()));
             }},
        {.max_sequences = 1, .queue_capacity = 4});
  executor_->hold();
  Connection first(port_), second(port_);
  first.post("/v1/chat/completions", kHello);
  executor_->await_held();
  second.post("/v1/chat/completions", kHello);
  EXPECT_TRUE(eventually([&] { return assistant_->engine().stats().n_waiting == 1; }));
  // A step every 600 ms: none takes as long as the second one would wait for, whenever it looks.
  for (int i = 0; i < 6; ++i) {
    const int64_t n_steps = assistant_->engine().stats().n_steps;
    executor_->allow(1);
    EXPECT_TRUE(eventually([&] { return assistant_->engine().stats().n_steps > n_steps; }));
    clock->ms += 600;
    const int64_t n_looks = clock->n_looks;
    EXPECT_TRUE(eventually([&] { return clock->n_looks > n_looks + 4; }));
  }
  executor_->allow(-1);
  EXPECT_EQ(first.read()->status, 200);
  EXPECT_EQ(second.read()->status, 200);
}

TEST_F(HttpFailure, StoppingFinishesTheAnswersThatRun) {
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

TEST_F(HttpFailure, AnswersThatTakeTooLongWhenStoppingAreGivenUp) {
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

}  // namespace
}  // namespace lily::test
