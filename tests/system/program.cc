#include "tests/system/program.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace lily::test {
namespace {

std::string read_all(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

}  // namespace

Outcome lily(const std::string& arguments, const std::string& environment, const std::string& input) {
  static int n_runs = 0;
  const auto base = std::filesystem::temp_directory_path() /
                    ("lily_system_" + std::to_string(getpid()) + "_" + std::to_string(n_runs++));
  const std::string out = base.string() + ".out", err = base.string() + ".err";
  const std::string command = "env -u LILY_MODEL HOME=/nonexistent " + environment + " " LILY_PROGRAM " " +
                              arguments + " >" + out + " 2>" + err + " <" + input;
  const int status = std::system(command.c_str());
  Outcome run{
      .exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1, .out = read_all(out), .err = read_all(err)};
  std::filesystem::remove(out);
  std::filesystem::remove(err);
  return run;
}

}  // namespace lily::test
