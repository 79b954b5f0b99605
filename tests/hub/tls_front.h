// TLS on loopback in front of a plain server, and the certificate that it shows.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tests/server/loopback_listener.h"

using SSL_CTX = struct ssl_ctx_st;

namespace lily::test {

// A certificate that signs itself, for these names, made by the program openssl. False if there is none.
bool make_certificate(const std::filesystem::path& certificate, const std::filesystem::path& key,
                      const std::vector<std::string>& names);

class TlsFront {
 public:
  // Passes what comes in on to the port behind it.
  TlsFront(uint16_t port_behind, const std::filesystem::path& certificate, const std::filesystem::path& key);

  int port() const { return listener_.port(); }

 private:
  void serve(int fd);

  const uint16_t port_behind_;
  const std::shared_ptr<SSL_CTX> context_;
  LoopbackListener listener_;  // last: its threads use all of the above
};

}  // namespace lily::test
