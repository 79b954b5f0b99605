#include "tests/hub/tls_front.h"

#include <fmt/format.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <stdexcept>

#include "tests/hub/pump.h"

namespace lily::test {

bool make_certificate(const std::filesystem::path& certificate, const std::filesystem::path& key,
                      const std::vector<std::string>& names) {
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "DNS:" : ",DNS:") + name;
  const std::string command = fmt::format(
      "openssl req -x509 -newkey rsa:2048 -nodes -keyout {0} -out {1} -days 2 -subj /CN={2} "
      "-addext subjectAltName={3} >{1}.log 2>&1",
      key.string(), certificate.string(), names.at(0), all);
  return std::system(command.c_str()) == 0;
}

namespace {

std::shared_ptr<SSL_CTX> context_of(const std::filesystem::path& certificate,
                                    const std::filesystem::path& key) {
  std::shared_ptr<SSL_CTX> context(SSL_CTX_new(TLS_server_method()), SSL_CTX_free);
  if (SSL_CTX_use_certificate_file(context.get(), certificate.c_str(), SSL_FILETYPE_PEM) != 1 ||
      SSL_CTX_use_PrivateKey_file(context.get(), key.c_str(), SSL_FILETYPE_PEM) != 1)
    throw std::runtime_error("a certificate that OpenSSL cannot use");
  return context;
}

}  // namespace

TlsFront::TlsFront(uint16_t port_behind, const std::filesystem::path& certificate,
                   const std::filesystem::path& key)
    : port_behind_(port_behind),
      context_(context_of(certificate, key)),
      listener_([this](int fd) { serve(fd); }) {}

// One side at a time: a client asks, the server answers, and neither speaks while the other does.
void TlsFront::serve(int fd) {
  SSL* const tls = SSL_new(context_.get());
  SSL_set_fd(tls, fd);
  const int behind = connect_to(port_behind_);
  if (behind >= 0 && SSL_accept(tls) == 1) {
    std::array<char, 1 << 14> bytes;
    std::array<pollfd, 2> ends = {pollfd{fd, POLLIN, 0}, pollfd{behind, POLLIN, 0}};
    while (SSL_pending(tls) > 0 || ::poll(ends.data(), ends.size(), -1) > 0) {
      if (SSL_pending(tls) > 0 || ends[0].revents != 0) {
        const int n = SSL_read(tls, bytes.data(), static_cast<int>(bytes.size()));
        if (n <= 0 || ::send(behind, bytes.data(), static_cast<size_t>(n), MSG_NOSIGNAL) != n) break;
        ends[0].revents = 0;
        continue;
      }
      const ssize_t n = ::recv(behind, bytes.data(), bytes.size(), 0);
      if (n <= 0 || SSL_write(tls, bytes.data(), static_cast<int>(n)) != n) break;
    }
  }
  SSL_shutdown(tls);
  SSL_free(tls);
  if (behind >= 0) ::close(behind);
  ::shutdown(fd, SHUT_RDWR);
}

}  // namespace lily::test
