#include "tests/hub/child.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>

#include "tests/support/temp_folder.h"

namespace lily::test {

Child::Child(const std::vector<std::string>& arguments,
             const std::map<std::string, std::string>& environment) {
  static int n_children = 0;
  const auto base = std::filesystem::temp_directory_path() /
                    ("lily_child_" + std::to_string(getpid()) + "_" + std::to_string(n_children++));
  out_ = base.string() + ".out", err_ = base.string() + ".err";
  std::vector<std::string> words = {LILY_PROGRAM}, settings = {std::string("PATH=") + std::getenv("PATH")};
  words.insert(words.end(), arguments.begin(), arguments.end());
  for (const auto& [name, value] : environment) settings.push_back(name + "=" + value);
  std::vector<char*> argv, envp;
  for (std::string& word : words) argv.push_back(word.data());
  for (std::string& setting : settings) envp.push_back(setting.data());
  argv.push_back(nullptr), envp.push_back(nullptr);
  // Before the child runs, so that they can be read at once.
  const int out = open(out_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  const int err = open(err_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  pid_ = fork();
  if (pid_ != 0) {
    close(out), close(err);
    return;
  }
  dup2(open("/dev/null", O_RDONLY), STDIN_FILENO), dup2(out, STDOUT_FILENO), dup2(err, STDERR_FILENO);
  execve(argv[0], argv.data(), envp.data());
  _exit(127);
}

Child::~Child() {
  if (pid_ > 0) {
    send(SIGKILL);
    wait();
  }
  std::error_code ignored;
  std::filesystem::remove(out_, ignored);
  std::filesystem::remove(err_, ignored);
}

void Child::send(int signal) const { kill(pid_, signal); }

int Child::wait() {
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) continue;
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

std::string Child::out() const { return read_file(out_); }
std::string Child::err() const { return read_file(err_); }

}  // namespace lily::test
