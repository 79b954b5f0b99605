#include "server/peer.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>

namespace lily::server {
namespace {

constexpr std::chrono::milliseconds kDrainFor{1000};
constexpr int kFirstFd = 3, kLastFd = 1 << 16;
constexpr int kMaxGap = 512;  // file descriptors are given out lowest first, so that gaps are short

#ifdef POLLRDHUP  // the client has closed its half
constexpr short kLeft = POLLRDHUP;
#else
constexpr short kLeft = 0;
#endif
constexpr short kGone = kLeft | POLLHUP | POLLERR;

struct Address {
  std::string host;
  int port = -1;
};

template <typename Ask>
Address address_of(int fd, Ask ask) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  auto* const address = reinterpret_cast<sockaddr*>(&storage);
  if (ask(fd, address, &length) != 0) return {};
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (getnameinfo(address, length, host.data(), host.size(), port.data(), port.size(),
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return {};
  return {host.data(), std::atoi(port.data())};
}

// Calls `take` with each connected socket of the internet, until it returns false.
template <typename Take>
void each_connection(Take take) {
  for (int fd = kFirstFd, gap = 0; fd < kLastFd && gap < kMaxGap; ++fd) {
    sockaddr_storage storage{};
    socklen_t length = sizeof storage;
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&storage), &length) != 0) {
      gap = errno == EBADF ? gap + 1 : 0;
      continue;
    }
    gap = 0;
    if (storage.ss_family != AF_INET && storage.ss_family != AF_INET6) continue;
    if (!take(fd)) return;
  }
}

}  // namespace

Peer Peer::find(const std::string& remote_address, int remote_port, int local_port) {
  int found = -1;
  each_connection([&](int fd) {
    const Address remote = address_of(fd, getpeername);
    if (remote.port != remote_port || remote.host != remote_address) return true;
    if (address_of(fd, getsockname).port == local_port) found = fd;
    return found < 0;
  });
  return Peer(found);
}

std::vector<Peer::Client> Peer::all(int local_port) {
  std::vector<Client> clients;
  each_connection([&](int fd) {
    if (address_of(fd, getsockname).port != local_port) return true;
    const Address remote = address_of(fd, getpeername);
    if (remote.port >= 0) clients.push_back({remote.host, remote.port, Peer(fd)});
    return true;
  });
  return clients;
}

bool Peer::is_there() const {
  if (fd_ < 0) return true;
  char byte = 0;
  const ssize_t n = recv(fd_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return n > 0 || (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
}

bool Peer::has_sent() const {
  // Asked without touching the stream, which another thread may be reading.
  pollfd asked{fd_, POLLIN | kLeft, 0};
  return fd_ >= 0 && poll(&asked, 1, 0) == 1 && (asked.revents & POLLIN) != 0 && (asked.revents & kGone) == 0;
}

void Peer::hang_up() const {
  if (fd_ < 0) return;
  using Clock = std::chrono::steady_clock;
  shutdown(fd_, SHUT_WR);
  std::array<char, 1 << 16> dropped;
  for (const auto end = Clock::now() + kDrainFor; Clock::now() < end;) {
    pollfd readable{fd_, POLLIN, 0};
    if (poll(&readable, 1, static_cast<int>(kDrainFor.count())) <= 0) break;
    if (recv(fd_, dropped.data(), dropped.size(), MSG_DONTWAIT) <= 0) break;
  }
  shutdown(fd_, SHUT_RD);
}

void Peer::hear_no_more() const {
  if (fd_ >= 0) shutdown(fd_, SHUT_RD);
}

void Peer::end() const {
  if (fd_ >= 0) shutdown(fd_, SHUT_RDWR);
}

}  // namespace lily::server
