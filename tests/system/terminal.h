// The built program on a pseudo-terminal: keys in, what it shows out.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <string>
#include <vector>

#ifdef __APPLE__
#include <util.h>
#else
#include <pty.h>
#endif

namespace lily::test {

class Terminal {
 public:
  explicit Terminal(const std::string& home,
                    std::vector<const char*> arguments = {"lily", "run", "-m", "models/lily-tiny",
                                                          "--no-think", "-t", "0"}) {
    arguments.push_back(nullptr);
    child_ = forkpty(&fd_, nullptr, nullptr, nullptr);
    if (child_ != 0) return;
    setenv("HOME", home.c_str(), 1);
    unsetenv("LILY_CACHE");
    unsetenv("LILY_MODEL");
    execv(LILY_PROGRAM, const_cast<char* const*>(arguments.data()));
    _exit(127);
  }
  ~Terminal() {
    if (child_ > 0) kill(child_, SIGKILL);
    close(fd_);
  }

  void type(const std::string& keys) {
    ASSERT_EQ(write(fd_, keys.data(), keys.size()), static_cast<ssize_t>(keys.size()));
  }

  // What has come since the last call, up to and with `text`; all of it where that does not come within 20 s.
  std::string wait_for(const std::string& text) {
    for (int i = 0; i < 200; ++i) {
      if (const size_t at = seen_.find(text); at != std::string::npos) {
        std::string before = seen_.substr(0, at + text.size());
        seen_.erase(0, at + text.size());
        return before;
      }
      pollfd waiting{fd_, POLLIN, 0};
      if (poll(&waiting, 1, 100) <= 0) continue;
      char buffer[4096];
      const ssize_t n = read(fd_, buffer, sizeof buffer);
      if (n <= 0) break;
      seen_.append(buffer, static_cast<size_t>(n));
    }
    ADD_FAILURE() << "'" << text << "' did not come; got: " << seen_;
    return seen_;
  }

  int exit_code() {
    int status = 0;
    for (int i = 0; i < 200; ++i) {
      if (waitpid(child_, &status, WNOHANG) == child_) {
        child_ = -1;
        return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
      }
      pollfd waiting{fd_, POLLIN, 0};
      char buffer[4096];
      if (poll(&waiting, 1, 100) > 0 && read(fd_, buffer, sizeof buffer) < 0) usleep(10000);
    }
    return -1;  // still running after 20 s
  }

 private:
  pid_t child_ = -1;
  int fd_ = -1;
  std::string seen_;
};

}  // namespace lily::test
