#include "tests/server/raw_server.h"

#include <poll.h>
#include <sys/socket.h>

namespace lily::test {
namespace {

// The request's head and as much of a body as it says.
std::string read_request(int fd) {
  std::string text;
  size_t wanted = std::string::npos;
  while (text.size() < wanted) {
    char bytes[65536];
    const ssize_t n = ::recv(fd, bytes, sizeof bytes, 0);
    if (n <= 0) return {};
    text.append(bytes, static_cast<size_t>(n));
    const size_t end = text.find("\r\n\r\n");
    if (end == std::string::npos || wanted != std::string::npos) continue;
    const size_t length = text.find("Content-Length: ");
    wanted = end + 4 + (length < end ? std::stoul(text.substr(length + 16)) : 0);
  }
  return text;
}

}  // namespace

bool RawServer::Exchange::send(std::string_view bytes) const {
  while (!bytes.empty()) {
    const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

bool RawServer::Exchange::is_left_within(std::chrono::milliseconds timeout) const {
  pollfd waiting{fd_, POLLIN, 0};
  char byte = 0;
  return ::poll(&waiting, 1, static_cast<int>(timeout.count())) == 1 && ::recv(fd_, &byte, 1, 0) <= 0;
}

RawServer::RawServer(std::string answer)
    : RawServer([answer = std::move(answer)](const Exchange& exchange) { exchange.send(answer); }) {}

RawServer::RawServer(Handler handler)
    : handler_(std::move(handler)), listener_([this](int fd) { serve(fd); }) {}

void RawServer::serve(int fd) {
  std::string request = read_request(fd);
  if (!request.empty()) {
    {
      const std::lock_guard lock(mutex_);
      requests_.push_back(request);
    }
    handler_(Exchange(fd, std::move(request)));
  }
  ::shutdown(fd, SHUT_RDWR);
}

std::vector<std::string> RawServer::requests() const {
  const std::lock_guard lock(mutex_);
  return requests_;
}

std::string http_answer(std::string_view body, std::string_view type, std::string_view status,
                        std::string_view headers) {
  return "HTTP/1.1 " + std::string(status) + "\r\nContent-Type: " + std::string(type) +
         "\r\nContent-Length: " + std::to_string(body.size()) + "\r\n" + std::string(headers) + "\r\n" +
         std::string(body);
}

}  // namespace lily::test
