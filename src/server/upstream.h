// Other engines that answer for models of other names: which request goes where, with which headers, and that
// none goes in a circle.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/relay.h"

namespace lily::server {

// An engine that speaks OpenAI's API.
struct Upstream {
  std::string name;              // of its model
  std::string base;              // "http://gpu:8000/v1", to which "/chat/completions" is added
  std::string key;               // sent as a bearer; empty: none. It is never logged
  bool is_key_in_clear = false;  // a key would go over plain http to another machine
};

// From "NAME=URL"; a URL without a path gets /v1. Throws Error(Fault::user).
Upstream parse_upstream(const std::string& text);
// The variable of the environment that holds the key: "Qwen/Qwen3-235B" ->
// "LILY_UPSTREAM_KEY_QWEN_QWEN3_235B".
std::string key_variable_of(std::string_view name);

// Throws Error(Fault::user) if two names are the same or have the same key variable, or a key cannot be sent.
void check_upstreams(const std::vector<Upstream>& upstreams);

struct UpstreamOptions {
  std::vector<Upstream> upstreams;
  std::chrono::milliseconds connect_timeout = std::chrono::seconds(10);
  std::string ca_file;  // of certificates that are trusted instead of the system's; empty: those
  RelayLimits limits;
};

// What a client sent, as far as it goes on.
struct RelayRequest {
  std::string path;   // "/v1/chat/completions"; with or without /v1
  std::string query;  // without '?'
  std::vector<std::pair<std::string, std::string>> headers;
  std::string_view body;  // a JSON object
  bool wants_stream = false;
};

class Upstreams {
 public:
  // The upstreams have been checked.
  explicit Upstreams(UpstreamOptions options);
  ~Upstreams();

  struct Route {
    size_t index = 0;   // of the upstream
    std::string model;  // its name there; empty: as the client has it
  };
  // The request for NAME goes to the upstream of this name as it is, one for NAME/REST as one for REST.
  // Nothing if the model is a local one.
  std::optional<Route> find(std::string_view model, std::string_view local_model) const;
  // From any thread. Throws ApiError if the request has been here before.
  std::unique_ptr<Relay> start(const Route& route, const RelayRequest& request);

  bool empty() const { return options_.upstreams.empty(); }
  const std::vector<Upstream>& all() const { return options_.upstreams; }
  std::string metrics() const;  // Prometheus' text format

 private:
  struct Counters {
    std::atomic<int64_t> n_done = 0, n_failed = 0, n_left = 0;
    std::atomic<int64_t> prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0;
  };

  std::string via_of(const RelayRequest& request) const;
  std::string label(size_t index) const;  // of metrics

  const UpstreamOptions options_;
  const std::string id_;  // of this server, to know its own requests again
  std::unique_ptr<Transport> transport_;
  std::vector<std::unique_ptr<Counters>> counters_;
};

// The text with another value of its member "model". The text is a JSON object that has been parsed, and all
// other bytes stay.
std::string with_model(std::string_view object, std::string_view model);

}  // namespace lily::server
