// The safetensors files of a checkpoint folder, opened, and all their headers in one table.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "base/file.h"
#include "model/safetensors.h"

namespace lily::model {

// What is wrong with a checkpoint. The order is that of importance: a file in another layout also misses
// tensors, but that is not what its owner needs to hear.
struct Problem {
  enum class Kind { file, unconverted, unsupported, mismatch, missing, unused };
  Kind kind = Kind::file;
  std::string name;     // the file or tensor
  std::string message;  // one line
};

struct LocatedTensor {
  TensorEntry entry;
  int file = -1;        // index into Shards::files
  uint64_t offset = 0;  // in the file
};

struct Shards {
  std::vector<File> files;
  std::vector<std::string> headers;              // their JSON, one each
  std::map<std::string, LocatedTensor> tensors;  // by name as in the file
  std::vector<std::string> mtp_names;  // in mtp*.safetensors, which hold a draft head and are not opened
  std::map<std::string, std::string> promised;  // by the index: normalised tensor name -> file
  std::vector<std::string> absent_files;        // named by the index or by the numbering, not in the folder
  std::vector<std::string> notices;
  std::vector<Problem> problems;
};

// Looks at `model*.safetensors` and the files the index names; the headers decide, the index is advice. What
// is wrong is collected, not thrown.
Shards open_shards(const std::filesystem::path& folder);

// Whether the index may name this file: a plain name ending in .safetensors, without any path.
bool is_safe_shard_name(std::string_view name);

// Parses model.safetensors.index.json: tensor name -> file name. Throws Fault::model.
std::map<std::string, std::string> parse_index(std::string_view text);

}  // namespace lily::model
