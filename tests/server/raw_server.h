// A server that answers what a test says, byte by byte: the other engine on a bad day.
#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "tests/server/loopback_listener.h"

namespace lily::test {

class RawServer {
 public:
  // One connection with one request; closed when the handler returns.
  class Exchange {
   public:
    Exchange(int fd, std::string request) : fd_(fd), request_(std::move(request)) {}
    const std::string& request() const { return request_; }  // head and body
    std::string body() const { return request_.substr(request_.find("\r\n\r\n") + 4); }
    bool send(std::string_view bytes) const;
    int fd() const { return fd_; }  // for what a request and an answer are not enough for
    // True once the client has closed the connection.
    bool is_left_within(std::chrono::milliseconds timeout = std::chrono::seconds(10)) const;

   private:
    int fd_;
    std::string request_;
  };
  using Handler = std::function<void(const Exchange&)>;

  explicit RawServer(Handler handler);
  // That sends these bytes to every request.
  explicit RawServer(std::string answer);
  std::string url() const { return "http://127.0.0.1:" + std::to_string(listener_.port()) + "/v1"; }
  std::vector<std::string> requests() const;

 private:
  void serve(int fd);

  const Handler handler_;
  mutable std::mutex mutex_;
  std::vector<std::string> requests_;
  LoopbackListener listener_;  // last: its threads use all of the above
};

// "HTTP/1.1 200 OK" with this type and body.
std::string http_answer(std::string_view body, std::string_view type = "application/json",
                        std::string_view status = "200 OK", std::string_view headers = "");
// The head of a stream whose end is the end of the connection.
inline constexpr const char* kStreamHead =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n\r\n";

}  // namespace lily::test
