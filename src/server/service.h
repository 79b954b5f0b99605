// What the endpoints do, without HTTP: one assistant, and what is counted and told about it.
//
// Threads: every member may be called from any thread at any time.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "engine/assistant.h"
#include "server/dialect.h"
#include "server/upstream.h"

namespace lily::server {

struct ServiceOptions {
  std::string model_id;  // the name in /v1/models
  bool preserve_thinking = false;
  bool keep_volatile = false;  // ServedModel::keep_volatile
  bool log_misses = false;     // with the texts around the difference, which are parts of prompts
  // An answer whose model makes no step for so long has failed.
  std::chrono::milliseconds step_timeout = std::chrono::minutes(10);
  std::chrono::milliseconds keep_alive = std::chrono::seconds(5);
  UpstreamOptions upstreams;  // with the two times above
  std::function<std::chrono::steady_clock::time_point()> now = std::chrono::steady_clock::now;
};

// What became of a request, for the log.
struct Outcome {
  bool client_left = false;
  std::string error;
  std::optional<engine::AnswerEnd> end;
};

class Service {
 public:
  // The assistant is loaded and outlives this.
  Service(engine::Assistant& assistant, ServiceOptions options);

  const ServedModel& model() const { return model_; }
  engine::Assistant& assistant() { return assistant_; }
  Upstreams& upstreams() { return upstreams_; }

  // Throws ApiError for what can be told before anything is sent.
  engine::AnswerStream start(const Call& call);

  // Takes bytes for the client; false if it cannot any more.
  using Send = std::function<bool(const std::string& bytes)>;
  using IsThere = std::function<bool()>;
  // Sends the answer as it comes. A failure is told in the stream, and in the log with the request's id.
  Outcome stream(engine::AnswerStream& answer, AnswerWriter& writer, const Send& send,
                 const IsThere& is_there, const std::string& request_id);
  // The whole answer; empty if the client has left. Throws ApiError.
  std::optional<Json> whole(engine::AnswerStream& answer, AnswerWriter& writer, const IsThere& is_there,
                            Outcome& outcome);

  Json models() const;
  std::optional<Json> model_entry(const std::string& id) const;
  Json tokenize(const Json& body) const;
  Json detokenize(const Json& body) const;
  Json apply_template(const Json& body) const;
  Json count_tokens(const engine::ChatRequest& request) const;
  Json cache() const;
  void clear_cache() { assistant_.engine().clear_cache(); }
  // Prometheus' text format.
  std::string metrics() const;
  // Answers that run end with an error, and no others begin: the server stops.
  void give_up() { gives_up_ = true; }
  void count(int status) { ++(status < 400 ? n_ok_ : status < 500 ? n_refused_ : n_failed_); }

 private:
  // Memory of the device that the cache and the answers that run hold.
  struct Held {
    int64_t kv_bytes = 0, state_bytes = 0;
  };
  Held held(const engine::EngineStats& stats) const;
  // Calls `take` with each event until the answer has ended or the client has left; `idle` when a keep-alive
  // is due. Throws ApiError.
  Outcome pump(engine::AnswerStream& answer, const std::function<bool(const engine::AnswerEvent&)>& take,
               const std::function<bool()>& idle, const IsThere& is_there);
  void note_ignored(const std::vector<std::string>& names);
  void log_miss(const engine::AnswerEnd& end) const;

  engine::Assistant& assistant_;
  const ServiceOptions options_;
  const ServedModel model_;
  Upstreams upstreams_;
  std::atomic<int64_t> n_ok_ = 0, n_refused_ = 0, n_failed_ = 0, n_left_ = 0;
  std::atomic<bool> gives_up_ = false;
  std::mutex ignored_mutex_;
  std::set<std::string> ignored_;  // names of fields that have been logged
};

}  // namespace lily::server
