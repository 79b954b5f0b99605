// One request that another engine answers: its answer on the way to the client, checked, and its failures in
// the words of the API that was called. No HTTP library here.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/dialect.h"
#include "server/transport.h"

namespace lily::server {

enum class Api { openai, responses, anthropic };  // the shape of errors, whole and in a stream

// "/v1/chat/completions" -> openai
Api api_of(const std::string& path);

struct RelayLimits {
  std::chrono::milliseconds silence = std::chrono::minutes(10);  // without the head, or any byte
  std::chrono::milliseconds keep_alive = std::chrono::seconds(5);
  size_t max_body_bytes = size_t{64} << 20;  // of an answer that is not streamed
};

struct RelayReply {
  int status = 200;
  std::vector<std::pair<std::string, std::string>> headers;
  bool is_stream = false;
  std::string body;  // JSON, unless it is a stream
};

enum class RelayEnd { none, done, failed, client_left };

// What the other engine says of its answer; nothing where it says nothing.
struct RelayUsage {
  int64_t prompt_tokens = 0;  // cached ones included
  int64_t cached_tokens = 0;
  int64_t completion_tokens = 0;
};

// Used by one thread.
class Relay {
 public:
  struct Options {
    std::string upstream;      // its name, for messages
    std::string address;       // without anything secret
    std::string key_variable;  // of the environment
    Api api = Api::openai;
    bool wants_stream = false;
    RelayLimits limits;
    std::function<void(RelayEnd, const RelayUsage&)> on_end;  // when this ends, once
  };
  Relay(std::unique_ptr<Transfer> transfer, Options options);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  using IsThere = std::function<bool()>;
  using Send = std::function<bool(const std::string& bytes)>;
  // Waits for the answer: for its head if it is a stream, for all of it if not. A stream whose head is late
  // is begun without it, so that the client can be kept alive. Empty if the client has left. Throws ApiError.
  std::optional<RelayReply> reply(const IsThere& is_there);
  // Sends a stream as it comes; a failure is told in it. False if the connection to the client must end here:
  // it has left, or the stream broke off within an event.
  bool stream(const Send& send, const IsThere& is_there);
  RelayEnd ended() const { return end_; }

 private:
  using Clock = std::chrono::steady_clock;

  // What can be said of the answer so far; nothing if more of it has to come. Throws ApiError.
  std::optional<RelayReply> judge();
  RelayReply head_of_stream() const;
  RelayReply whole_reply();
  RelayReply refusal(int status) const;
  std::vector<std::pair<std::string, std::string>> headers() const;
  bool pump(const Send& send, const IsThere& is_there);
  bool leave();
  void follow(const std::string& bytes);
  void read_usage(const Json& answer);
  std::string keep_alive() const;
  std::string failure_event(const Json& error) const;
  void check_silence() const;
  void check_transfer() const;
  [[noreturn]] void fail(int status, const char* code, const std::string& what) const;

  std::unique_ptr<Transfer> transfer_;  // null: closed
  const Options options_;
  RelayEnd end_ = RelayEnd::none;
  Clock::time_point last_heard_ = Clock::now(), last_sent_ = last_heard_;
  std::string collected_;      // of an answer that is not streamed, or of an error
  bool is_streaming_ = false;  // the head is there and says so
  // Where the stream stands: nothing may be put into an event that is not complete.
  bool is_between_events_ = true, is_line_empty_ = true;
  bool is_line_data_ = false;
  std::string line_;  // of an event, as far as it is worth to be looked at
  RelayUsage usage_;
  int64_t n_events_ = 0;
};

}  // namespace lily::server
