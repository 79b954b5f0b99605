// Formats that people have on their disks and that lily does not read, so that they hear more than "this is
// no checkpoint".
#pragma once

#include <filesystem>
#include <string>

namespace lily::model {

// What `path` is, as in "a GGUF file" or, for a folder without safetensors, "a folder with a GGUF file";
// empty for what is not known.
std::string foreign_format(const std::filesystem::path& path);

}  // namespace lily::model
