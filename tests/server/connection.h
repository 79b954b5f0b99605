// A client as bytes on a socket: what it sends is exactly what a test says, broken requests too.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace lily::test {

struct HttpReply {
  int status = 0;
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;                            // chunks joined
};

class Connection {
 public:
  // To 127.0.0.1, or to another address of this machine ("::1").
  explicit Connection(int port, const std::string& address = "127.0.0.1");
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // False if the server has closed the connection.
  bool send(std::string_view bytes);
  // A request with these header lines ("Name: value\r\n"...) and a body, its length told.
  bool request(std::string_view method, std::string_view path, std::string_view body = {},
               std::string_view headers = {});
  bool post(std::string_view path, std::string_view body) { return request("POST", path, body); }

  // Nothing if the connection ends, or nothing comes in time.
  std::optional<HttpReply> read(std::chrono::milliseconds timeout = std::chrono::seconds(10));
  // Until `text` has come; what had come by then.
  std::string read_until(std::string_view text, std::chrono::milliseconds timeout = std::chrono::seconds(10));
  // True once the server has closed the connection.
  bool is_closed_within(std::chrono::milliseconds timeout);
  void close();

 private:
  bool fill(std::chrono::steady_clock::time_point deadline);

  int fd_ = -1;
  std::string buffer_;
};

}  // namespace lily::test
