// What each open connection is at, and the limits in time that the HTTP library does not have: it takes a
// request that comes byte by byte for as long as the next byte is never late, and lets answers run for ever
// when the server stops. Also what has become of a request on its connection, for the log.
//
// Threads: every member may be called from any thread at any time. begin(), answering() and end() are called
// by the thread that serves the connection.
#pragma once

#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "server/service.h"

namespace lily::server {

class Connections {
 public:
  using Clock = std::chrono::steady_clock;
  using Key = std::pair<std::string, int>;  // address and port of the client

  // `head`, `body`: for all bytes of a request's; `idle`: for the first of the next one.
  Connections(std::chrono::seconds head, std::chrono::seconds body, std::chrono::seconds idle)
      : head_(head), body_(body), idle_(idle) {}

  struct Request {
    std::optional<Clock::time_point> begun;  // nothing where no headers could be read
    std::optional<Outcome> outcome;          // of an answer of the model
  };
  void begin(const Key& client);      // the headers are read
  void answering(const Key& client);  // the body too
  void came_to(const Key& client, Outcome outcome);
  Request end(const Key& client);  // the answer is sent

  // Looks at all connections to this port: those whose request takes too long are heard no more, which makes
  // the HTTP library close them. With `stopping` all that have no request to be answered are. Of more than
  // `most` connections, which have no threads for all of them, those that say nothing make room for others,
  // the oldest first. To be called from time to time.
  void check(int local_port, bool stopping, size_t most, Clock::time_point now = Clock::now());
  // Breaks all connections to this port.
  static void break_all(int local_port);

 private:
  enum class State { reading, answering };
  struct Entry {
    State state = State::reading;
    Clock::time_point deadline;  // of reading
    Request request;
    bool seen = false;
  };
  Entry& entry(const Key& client);

  const std::chrono::seconds head_, body_, idle_;
  std::mutex mutex_;
  std::map<Key, Entry> entries_;
};

}  // namespace lily::server
