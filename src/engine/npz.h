// Reads NumPy's .npz archives: a zip file of .npy arrays, stored without compression as numpy.savez writes
// them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lily::engine {

struct NpyArray {
  std::string what;                   // file and array, for messages
  std::vector<int64_t> shape;         // row-major
  std::vector<double> data;           // <i4, <i8, <f4 and <f8 are converted; all but large <i8 exactly
  std::vector<int32_t> ints() const;  // Error(Fault::model) if a number is none of 32 bits
  std::vector<float> floats() const;
};

// By name, without ".npy". Throws Error(Fault::model) that begins with `what` for anything else than is
// described above, and for sizes that do not fit the file.
std::map<std::string, NpyArray> parse_npz(std::span<const std::byte> file, std::string_view what);
std::map<std::string, NpyArray> read_npz(const std::filesystem::path& path);

}  // namespace lily::engine
