#include "cli/child_process.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "cli/command.h"

#ifdef __APPLE__
#include <mach-o/dyld.h>
#endif

extern char** environ;

namespace lily::cli {
namespace {

constexpr size_t kMostOutput = size_t{64} << 20;

}  // namespace

std::string executable_path() {
#ifdef __APPLE__
  std::array<char, 4096> path{};
  uint32_t n_bytes = path.size();
  if (_NSGetExecutablePath(path.data(), &n_bytes) == 0) return path.data();
#else
  std::error_code error;
  const auto path = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) return path.string();
#endif
  fail(Fault::device, "the path of this program cannot be found out");
}

std::string run_child(const std::vector<std::string>& command) {
  int ends[2];
  if (::pipe(ends) != 0) fail(Fault::device, "no pipe can be made: {}", std::strerror(errno));
  ::fcntl(ends[0], F_SETFD, FD_CLOEXEC);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_addclose(&actions, ends[1]);
  std::vector<char*> arguments;
  arguments.reserve(command.size() + 1);
  for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  pid_t child = -1;
  const int failed = ::posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  ::close(ends[1]);
  if (failed != 0) {
    ::close(ends[0]);
    fail(Fault::user, "{}: cannot be run: {}", command[0], std::strerror(failed));
  }
  std::string out;
  std::array<char, 65536> bytes{};
  bool told = false, is_endless = false;
  while (true) {
    if (interrupted() && !told) {
      ::kill(child, SIGINT);
      told = true;
    }
    const ssize_t n = ::read(ends[0], bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    out.append(bytes.data(), static_cast<size_t>(n));
    if (out.size() > kMostOutput && !told) {
      ::kill(child, SIGKILL);
      told = is_endless = true;
    }
    if (is_endless) out.clear();
  }
  ::close(ends[0]);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  check_interrupted();
  if (is_endless)
    fail(Fault::user, "{}: printed more than {} MiB and was ended", command[0], kMostOutput >> 20);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
    fail(Fault::user, "{}: ended with {} {}", command[0], WIFEXITED(status) ? "exit code" : "signal",
         WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
  return out;
}

}  // namespace lily::cli
