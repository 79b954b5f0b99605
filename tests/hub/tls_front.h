// TLS on loopback in front of a plain server, and the certificate that it shows.
#pragma once

#include <cstdint>
#include <filesystem>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

using SSL_CTX = struct ssl_ctx_st;

namespace lily::test {

// A certificate that signs itself, for these names, made by the program openssl. False if there is none.
bool make_certificate(const std::filesystem::path& certificate, const std::filesystem::path& key,
                      const std::vector<std::string>& names);

class TlsFront {
 public:
  // Passes what comes in on to the port behind it.
  TlsFront(uint16_t port_behind, const std::filesystem::path& certificate, const std::filesystem::path& key);
  ~TlsFront();
  TlsFront(const TlsFront&) = delete;
  TlsFront& operator=(const TlsFront&) = delete;

  int port() const { return port_; }

 private:
  void serve(int fd);

  const uint16_t port_behind_;
  SSL_CTX* context_;
  int listener_ = -1, port_ = 0;
  std::mutex mutex_;
  std::vector<int> connections_;
  std::list<std::thread> threads_;
  std::thread acceptor_;
};

}  // namespace lily::test
