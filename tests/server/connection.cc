#include "tests/server/connection.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <stdexcept>

#include "base/ascii.h"

namespace lily::test {

using Clock = std::chrono::steady_clock;

Connection::Connection(int port, const std::string& address) {
  const addrinfo hints{.ai_flags = AI_NUMERICHOST, .ai_socktype = SOCK_STREAM};
  addrinfo* found = nullptr;
  if (::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) == 0) {
    fd_ = ::socket(found->ai_family, SOCK_STREAM, 0);
    if (::connect(fd_, found->ai_addr, found->ai_addrlen) != 0) close();
    ::freeaddrinfo(found);
  }
  if (fd_ < 0) throw std::runtime_error("no connection to " + address + " port " + std::to_string(port));
}

Connection::~Connection() { close(); }

void Connection::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

bool Connection::send(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

bool Connection::request(std::string_view method, std::string_view path, std::string_view body,
                         std::string_view headers) {
  std::string text = std::string(method) + " " + std::string(path) + " HTTP/1.1\r\nHost: localhost\r\n";
  text += headers;
  if (!body.empty()) text += "Content-Length: " + std::to_string(body.size()) + "\r\n";
  text += "\r\n";
  text += body;
  return send(text);
}

bool Connection::fill(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  pollfd waiting{fd_, POLLIN, 0};
  if (left <= 0 || ::poll(&waiting, 1, static_cast<int>(left)) <= 0) return false;
  char bytes[65536];
  const ssize_t n = ::recv(fd_, bytes, sizeof bytes, 0);
  if (n <= 0) return false;
  buffer_.append(bytes, static_cast<size_t>(n));
  return true;
}

std::string Connection::read_until(std::string_view text, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  while (buffer_.find(text) == std::string::npos)
    if (!fill(deadline)) break;
  return buffer_;
}

bool Connection::is_closed_within(std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  while (Clock::now() < deadline) {
    pollfd waiting{fd_, POLLIN, 0};
    if (::poll(&waiting, 1, 50) <= 0) continue;
    char byte[4096];
    if (::recv(fd_, byte, sizeof byte, 0) <= 0) return true;
  }
  return false;
}

std::optional<HttpReply> Connection::read(std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  size_t end = 0;
  while ((end = buffer_.find("\r\n\r\n")) == std::string::npos)
    if (!fill(deadline)) return {};
  HttpReply reply;
  const std::string head = buffer_.substr(0, end + 2);
  buffer_.erase(0, end + 4);
  reply.status = std::stoi(head.substr(head.find(' ') + 1));
  for (size_t at = head.find("\r\n") + 2; at < head.size();) {
    const size_t stop = head.find("\r\n", at), colon = head.find(": ", at);
    if (colon < stop)
      reply.headers[ascii_lower(head.substr(at, colon - at))] = head.substr(colon + 2, stop - colon - 2);
    at = stop + 2;
  }
  if (reply.headers["transfer-encoding"] == "chunked") {
    while (true) {
      size_t line = 0;
      while ((line = buffer_.find("\r\n")) == std::string::npos)
        if (!fill(deadline)) return {};
      const size_t n = std::stoul(buffer_.substr(0, line), nullptr, 16);
      while (buffer_.size() < line + 2 + n + 2)
        if (!fill(deadline)) return {};
      reply.body += buffer_.substr(line + 2, n);
      buffer_.erase(0, line + 2 + n + 2);
      if (n == 0) return reply;
    }
  }
  const size_t n = reply.headers.contains("content-length") ? std::stoul(reply.headers["content-length"]) : 0;
  while (buffer_.size() < n)
    if (!fill(deadline)) return {};
  reply.body = buffer_.substr(0, n);
  buffer_.erase(0, n);
  return reply;
}

}  // namespace lily::test
