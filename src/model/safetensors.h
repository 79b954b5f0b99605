// The safetensors container (docs/formats.md, "Container"): 8 bytes with the header's length N, N bytes of
// JSON, then the data of all tensors without gaps, in any order and at any alignment.
//
// Nothing in a file is believed: every field is checked against the file's size before anything of a size
// that a field names is allocated, and offsets of an accepted header lie inside the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"

namespace lily::model {

// `other` is a type this program has no use for; it is an error only for a tensor that is needed.
enum class Dtype : uint8_t { bf16, f16, f32, f64, f8, u8, i8, u16, i16, u32, i32, u64, i64, boolean, other };

Dtype dtype_of(std::string_view name);  // "BF16", "F8_E4M3", ...
int64_t dtype_bytes(Dtype dtype);       // of one element; 0 for `other`
std::string_view to_string(Dtype dtype);

struct TensorEntry {
  std::string name;
  Dtype dtype = Dtype::other;
  std::string dtype_name;       // as in the file
  std::vector<int64_t> shape;   // row-major
  uint64_t begin = 0, end = 0;  // bytes, counted from SafetensorsHeader::data_start
  int64_t n_bytes() const { return static_cast<int64_t>(end - begin); }
};

struct SafetensorsHeader {
  uint64_t data_start = 0;  // in the file; may be odd
  uint64_t data_bytes = 0;
  std::vector<TensorEntry> tensors;  // by position in the file
};

inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;
inline constexpr size_t kMaxTensorsPerFile = 100'000;
inline constexpr size_t kMaxTensorNameBytes = 512;
inline constexpr size_t kMaxTensorRank = 8;
inline constexpr int64_t kMaxTensorDim = int64_t{1} << 40;

// All errors are one line of Fault::model that starts with `what`, the file's name.
// Length of the JSON header, from the first 8 bytes of a file of file_bytes.
uint64_t safetensors_header_bytes(std::span<const std::byte> first_8, uint64_t file_bytes,
                                  std::string_view what);
// The header proper: `json` is those bytes.
SafetensorsHeader parse_safetensors_header(std::string_view json, uint64_t file_bytes, std::string_view what);
// Both, for a file in memory.
SafetensorsHeader parse_safetensors(std::span<const std::byte> file_bytes, std::string_view what);
// Both, for a file on disk. `raw`, if given, receives the header's text.
SafetensorsHeader read_safetensors_header(const File& file, std::string* raw = nullptr);

}  // namespace lily::model
