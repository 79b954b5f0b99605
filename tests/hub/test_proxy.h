// A proxy on loopback that takes every name for this machine, for plain HTTP and, where it may, for tunnels.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "tests/server/raw_server.h"

namespace lily::test {

class TestProxy {
 public:
  // `credentials`: the value of Proxy-Authorization that it wants; empty: anybody may pass.
  explicit TestProxy(std::string credentials = "");
  // Lets a request pass by CONNECT; without it such requests get 502.
  void allow_tunnels() { has_tunnels_ = true; }

  std::string host_and_port() const;
  std::vector<std::string> asked() const;  // first lines of the requests
  bool was_token_shown() const;            // an Authorization header came by

 private:
  void serve(const RawServer::Exchange& exchange) const;

  void tunnel(const RawServer::Exchange& exchange, const std::string& line) const;

  const std::string credentials_;
  std::atomic<bool> has_tunnels_ = false;
  RawServer server_;
};

}  // namespace lily::test
