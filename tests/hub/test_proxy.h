// A proxy for plain HTTP on loopback that takes every name for this machine.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/server/raw_server.h"

namespace lily::test {

class TestProxy {
 public:
  // `credentials`: the value of Proxy-Authorization that it wants; empty: anybody may pass.
  explicit TestProxy(std::string credentials = "");

  std::string host_and_port() const;
  std::vector<std::string> asked() const;  // first lines of the requests
  bool was_token_shown() const;            // an Authorization header came by

 private:
  void serve(const RawServer::Exchange& exchange) const;

  const std::string credentials_;
  RawServer server_;
};

}  // namespace lily::test
