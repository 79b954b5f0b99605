// A port on loopback with a thread for each connection: what servers of tests stand on.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <list>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace lily::test {

class LoopbackListener {
 public:
  // serve(socket) is called by a thread of its own for each connection; the socket is closed at the end of
  // this.
  explicit LoopbackListener(std::function<void(int fd)> serve) : serve_(std::move(serve)) {
    listener_ = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    if (::bind(listener_, any, sizeof address) != 0 || ::listen(listener_, 64) != 0 ||
        ::getsockname(listener_, any, &length) != 0)
      throw std::runtime_error("no port to listen on");
    port_ = ntohs(address.sin_port);
    acceptor_ = std::thread([this] {
      for (int fd = 0; (fd = ::accept(listener_, nullptr, nullptr)) >= 0;) {
        const std::lock_guard lock(mutex_);
        connections_.push_back(fd);
        threads_.emplace_back([this, fd] { serve_(fd); });
      }
    });
  }
  // Ends all connections, and returns when no thread serves one any more.
  ~LoopbackListener() {
    ::shutdown(listener_, SHUT_RDWR);
    ::close(listener_);
    acceptor_.join();
    for (const int fd : connections_) ::shutdown(fd, SHUT_RDWR);
    for (std::thread& thread : threads_) thread.join();
    for (const int fd : connections_) ::close(fd);
  }
  LoopbackListener(const LoopbackListener&) = delete;
  LoopbackListener& operator=(const LoopbackListener&) = delete;

  int port() const { return port_; }

 private:
  const std::function<void(int fd)> serve_;
  int listener_ = -1, port_ = 0;
  std::mutex mutex_;
  std::vector<int> connections_;
  std::list<std::thread> threads_;
  std::thread acceptor_;
};

}  // namespace lily::test
