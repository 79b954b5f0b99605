// The cpu backend, and what it is limited to on other processors: tests of it run on each.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/error.h"

namespace lily::test {

// Those that this machine can run: "cpu", "cpu-avx2".
inline std::vector<std::string> cpu_backends() {
  std::vector<std::string> names;
  for (const std::string& name : backend::compiled_backends()) {
    if (!name.starts_with("cpu")) continue;
    try {
      backend::make_device(name, {.threads = 1});
      names.push_back(name);
    } catch (const Error&) {
      // An instruction set that this processor does not have.
    }
  }
  return names;
}

// "cpu-avx2" as a part of a test's name.
inline std::string backend_test_name(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

}  // namespace lily::test
