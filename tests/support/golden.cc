#include "tests/support/golden.h"

#include <bit>
#include <cstring>

#include "base/error.h"
#include "base/file.h"
#include "model/safetensors.h"

namespace lily::test {

std::map<std::string, GoldenTensor> read_golden_tensors(const std::string& path) {
  const File file = File::open(path);
  const model::SafetensorsHeader header = model::read_safetensors_header(file);
  std::map<std::string, GoldenTensor> tensors;
  for (const model::TensorEntry& entry : header.tensors) {
    const bool is_float = entry.dtype == model::Dtype::f32;
    LILY_CHECK(is_float || entry.dtype == model::Dtype::i32, "{}", entry.name);
    GoldenTensor tensor{.shape = entry.shape,
                        .data = std::vector<float>(static_cast<size_t>(entry.n_bytes()) / 4)};
    file.read_at(header.data_start + entry.begin, std::as_writable_bytes(std::span(tensor.data)));
    if (!is_float)
      for (float& x : tensor.data) x = static_cast<float>(std::bit_cast<int32_t>(x));
    tensors.emplace(entry.name, std::move(tensor));
  }
  return tensors;
}

}  // namespace lily::test
