// Runs the built program from outside and looks at what it prints.
#pragma once

#include <string>

namespace lily::test {

struct Outcome {
  int exit_code = -1;
  std::string out, err;
};

// `arguments` is a shell fragment; the program runs in the source folder with an environment without LILY_*.
Outcome lily(const std::string& arguments, const std::string& environment = "",
             const std::string& input = "/dev/null");

}  // namespace lily::test
