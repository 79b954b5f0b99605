// Reads golden tensors (tests/golden) and the bundled model for tests.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace lily::test {

inline const char* const kTinyModel = "models/lily-tiny";
inline const char* const kTinyGoldens = "tests/golden/lily-tiny";

struct GoldenTensor {
  std::vector<int64_t> shape;
  std::vector<float> data;  // I32 tensors are converted; their values are far below 2^24
};

// All tensors of a safetensors file of F32 and I32 tensors.
std::map<std::string, GoldenTensor> read_golden_tensors(const std::string& path);

}  // namespace lily::test
