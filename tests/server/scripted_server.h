// A server on a free port, with lily-tiny's tokenizer and an executor that says what it is told to.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <thread>

#include "engine/assistant.h"
#include "server/http.h"
#include "tests/engine/scripted_executor.h"
#include "tests/server/connection.h"

namespace lily::test {

class ScriptedServer : public testing::Test {
 protected:
  static constexpr const char* kHello =
      R"({"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "reasoning_effort": "none"})";
  static constexpr const char* kHelloStreamed =
      R"({"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "reasoning_effort": "none", "stream": true})";

  ~ScriptedServer() override { stop(); }

  void start(server::HttpOptions http = {}, server::ServiceOptions service = {},
             engine::EngineOptions options = {}) {
    text::Tokenizer tokenizer = text::Tokenizer::load("models/lily-tiny");
    engine::Limits limits = engine::ScriptedExecutor::small();
    limits.n_tokens = tokenizer.n_tokens();
    limits.vocab = tokenizer.n_tokens() + 8;
    limits.max_context = 2048;
    limits.n_kv_blocks = 512;
    model::Config config;
    config.stop_ids = {*tokenizer.id_of("<|im_end|>")};
    const int32_t stop_id = config.stop_ids[0], start_id = *tokenizer.id_of("<|im_start|>");
    auto executor = std::make_unique<engine::ScriptedExecutor>(limits);
    executor_ = executor.get();
    const std::vector<int32_t> says = tokenizer.encode(says_, text::AddedTokens::all);
    const size_t n_header =
        tokenizer.encode("assistant\n<think>\n\n</think>\n\n", text::AddedTokens::all).size();
    // What the assistant says in this turn is counted from the last turn's beginning.
    executor->logits = [=, vocab = limits.vocab](std::span<const int32_t> prefix) {
      std::vector<float> row(static_cast<size_t>(vocab), 0.0f);
      const auto turn = std::find(prefix.rbegin(), prefix.rend(), start_id);
      const size_t n_said = static_cast<size_t>(turn - prefix.rbegin()) - n_header;
      row[static_cast<size_t>(n_said < says.size() ? says[n_said] : stop_id)] = 10;
      return row;
    };
    assistant_ =
        std::make_unique<engine::Assistant>(std::move(tokenizer), config, std::move(executor), options);
    service.model_id = "lily-tiny";
    service_ = std::make_unique<server::Service>(*assistant_, service);
    http.port = 0;
    http.n_threads = std::min(http.n_threads, 32);
    http_ = std::make_unique<server::HttpServer>(http);
    port_ = http_->bind();
    listener_ = std::thread([this] { http_->listen(); });
    if (is_loaded_) http_->set_service(*service_);
  }

  void stop() {
    if (!listener_.joinable()) return;
    if (executor_ != nullptr) executor_->allow(-1);
    http_->stop();
    listener_.join();
  }

  HttpReply ask(std::string_view method, std::string_view path, std::string_view body = {},
                std::string_view headers = {}) {
    Connection connection(port_);
    connection.request(method, path, body, headers);
    const auto reply = connection.read();
    if (!reply) ADD_FAILURE() << "no reply to " << method << " " << path;
    return reply.value_or(HttpReply{});
  }
  static server::Json json_of(const HttpReply& reply) { return server::Json::parse(reply.body); }
  server::Json chat() { return server::Json::parse(ask("POST", "/v1/chat/completions", kHello).body); }
  void expect_alive() { EXPECT_EQ(chat()["choices"][0]["message"]["content"], says_); }
  // Until the condition holds.
  template <typename Condition>
  static bool eventually(Condition condition) {
    for (int i = 0; i < 3000; ++i) {
      if (condition()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }

  std::string says_ = "one two three four";
  bool is_loaded_ = true;
  engine::ScriptedExecutor* executor_ = nullptr;  // the engine's
  std::unique_ptr<engine::Assistant> assistant_;
  std::unique_ptr<server::Service> service_;
  std::unique_ptr<server::HttpServer> http_;
  std::thread listener_;
  int port_ = 0;
};

}  // namespace lily::test
