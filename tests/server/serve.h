// `lily serve` with lily-tiny as a person starts it, on a free port.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/hub/child.h"
#include "tests/server/connection.h"

namespace lily::test {

class Serve {
 public:
  explicit Serve(std::vector<std::string> more, std::map<std::string, std::string> environment = {}) {
    std::vector<std::string> arguments = {"serve",      "-m", "models/lily-tiny", "--port", "0",
                                          "--parallel", "1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    environment.insert({{"HOME", "/nonexistent"}, {"no_proxy", "127.0.0.1"}});
    child_ = std::make_unique<Child>(arguments, environment);
    constexpr std::string_view kReady = "ready at http://127.0.0.1:";
    for (int i = 0; i < 6000 && port_ == 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      const std::string said = child_->err();
      const size_t at = said.find(kReady);
      if (at != said.npos && said.find('\n', at) != said.npos)
        port_ = std::stoi(said.substr(at + kReady.size()));
    }
    if (port_ == 0) throw std::runtime_error("no server: " + child_->err());
  }
  int port() const { return port_; }
  std::string url() const { return fmt::format("http://127.0.0.1:{}/v1", port_); }
  HttpReply ask(const std::string& path, const std::string& body, const std::string& headers = {}) const {
    Connection connection(port_);
    connection.request(body.empty() ? "GET" : "POST", path, body, headers);
    return connection.read(std::chrono::seconds(60)).value_or(HttpReply{});
  }
  std::string said() const { return child_->err(); }
  Child& child() { return *child_; }
  void kill() { child_.reset(); }

 private:
  std::unique_ptr<Child> child_;
  int port_ = 0;
};

}  // namespace lily::test
