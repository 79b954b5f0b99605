// The program as a child process that can be killed.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace lily::test {

class Child {
 public:
  // Environment: PATH and these. Standard input is empty; what it prints goes to files of its own.
  Child(const std::vector<std::string>& arguments, const std::map<std::string, std::string>& environment);
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }  // until it has been waited for
  void send(int signal) const;
  int wait();  // its exit code, or minus the signal that ended it
  std::string out() const;
  std::string err() const;

 private:
  pid_t pid_ = -1;
  std::filesystem::path out_, err_;
};

}  // namespace lily::test
