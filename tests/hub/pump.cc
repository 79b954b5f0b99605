#include "tests/hub/pump.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>

namespace lily::test {

int connect_to(uint16_t port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return fd;
  ::close(fd);
  return -1;
}

void pump(int one, int other) {
  std::array<char, 1 << 16> bytes;
  std::array<pollfd, 2> ends = {pollfd{one, POLLIN, 0}, pollfd{other, POLLIN, 0}};
  while (::poll(ends.data(), ends.size(), -1) > 0)
    for (size_t i = 0; i < ends.size(); ++i) {
      if (ends[i].revents == 0) continue;
      const ssize_t n = ::recv(ends[i].fd, bytes.data(), bytes.size(), 0);
      if (n <= 0) return;
      for (ssize_t at = 0; at < n;) {
        const ssize_t sent =
            ::send(ends[1 - i].fd, bytes.data() + at, static_cast<size_t>(n - at), MSG_NOSIGNAL);
        if (sent <= 0) return;
        at += sent;
      }
    }
}

}  // namespace lily::test
