#include "tests/hub/test_proxy.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>

#include "tests/hub/pump.h"

namespace lily::test {
namespace {

std::string first_line(const std::string& request) { return request.substr(0, request.find("\r\n")); }

}  // namespace

TestProxy::TestProxy(std::string credentials)
    : credentials_(std::move(credentials)),
      server_([this](const RawServer::Exchange& exchange) { serve(exchange); }) {}

void TestProxy::serve(const RawServer::Exchange& exchange) const {
  const std::string& request = exchange.request();
  if (!credentials_.empty() && request.find("Proxy-Authorization: " + credentials_) == std::string::npos) {
    exchange.send(
        "HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic realm=\"test\"\r\n"
        "Content-Length: 0\r\nConnection: close\r\n\r\n");
    return;
  }
  const std::string line = first_line(request);
  if (has_tunnels_ && line.rfind("CONNECT ", 0) == 0) return tunnel(exchange, line);
  constexpr std::string_view kStart = "GET http://";
  if (line.rfind(kStart, 0) != 0) {
    exchange.send("HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    return;
  }
  // "GET http://HOST:PORT/PATH HTTP/1.1" becomes "GET /PATH HTTP/1.1".
  const size_t path = line.find('/', kStart.size()), colon = line.find(':', kStart.size());
  const int fd = connect_to(static_cast<uint16_t>(std::stoi(line.substr(colon + 1))));
  if (fd < 0) return;
  const std::string onwards =
      "GET " + line.substr(path) + "\r\nConnection: close" + request.substr(line.size());
  ::send(fd, onwards.data(), onwards.size(), MSG_NOSIGNAL);
  char bytes[65536];
  for (ssize_t n = 0; (n = ::recv(fd, bytes, sizeof bytes, 0)) > 0;)
    if (!exchange.send({bytes, static_cast<size_t>(n)})) break;
  ::close(fd);
}

// "CONNECT HOST:PORT HTTP/1.1"
void TestProxy::tunnel(const RawServer::Exchange& exchange, const std::string& line) const {
  const int fd = connect_to(static_cast<uint16_t>(std::stoi(line.substr(line.find(':') + 1))));
  if (fd < 0) return;
  exchange.send("HTTP/1.1 200 Connection established\r\n\r\n");
  pump(exchange.fd(), fd);
  ::close(fd);
}

std::string TestProxy::host_and_port() const {
  const std::string url = server_.url();  // "http://HOST:PORT/v1"
  return url.substr(7, url.rfind('/') - 7);
}

std::vector<std::string> TestProxy::asked() const {
  std::vector<std::string> lines;
  for (const std::string& request : server_.requests()) lines.push_back(first_line(request));
  return lines;
}

bool TestProxy::was_token_shown() const {
  for (const std::string& request : server_.requests())
    if (request.find("\r\nAuthorization:") != std::string::npos) return true;
  return false;
}

}  // namespace lily::test
