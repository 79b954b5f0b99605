#include "model/foreign.h"

#include <array>
#include <fstream>
#include <string_view>
#include <utility>

#include "base/ascii.h"

namespace lily::model {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kGguf = "a GGUF file";
constexpr std::array<std::pair<std::string_view, std::string_view>, 9> kEndings = {
    {{".gguf", kGguf},
     {".ggml", "a GGML file"},
     {".bin", "a PyTorch file"},
     {".pt", "a PyTorch file"},
     {".pth", "a PyTorch file"},
     {".ckpt", "a PyTorch file"},
     {".onnx", "an ONNX file"},
     {".npz", "a NumPy archive"},
     {".h5", "an HDF5 file"}}};

std::string_view format_of_name(const fs::path& path) {
  const std::string ending = ascii_lower(path.extension().string());
  for (const auto& [known, what] : kEndings)
    if (ending == known) return what;
  return {};
}

std::string_view format_of_file(const fs::path& path) {
  std::array<char, 4> magic{};
  std::ifstream in(path, std::ios::binary);
  // Some tools name their files by checksum.
  if (in.read(magic.data(), magic.size()) && std::string_view(magic.data(), magic.size()) == "GGUF")
    return kGguf;
  return format_of_name(path);
}

}  // namespace

std::string foreign_format(const fs::path& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return std::string(format_of_file(path));
  std::string_view found;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    if (it->path().extension() == ".safetensors") return {};
    if (found.empty()) found = format_of_name(it->path());
  }
  return found.empty() ? std::string() : "a folder with " + std::string(found);
}

}  // namespace lily::model
