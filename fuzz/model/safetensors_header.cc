// The input is a whole safetensors file. An accepted header must describe it exactly; anything else must be
// refused with an error of one line.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/error.h"
#include "model/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lily;
  using namespace lily::model;
  try {
    const SafetensorsHeader header = parse_safetensors(std::as_bytes(std::span(data, size)), "input");
    LILY_CHECK(header.data_start + header.data_bytes == size);
    uint64_t end = 0;
    for (const TensorEntry& tensor : header.tensors) {
      LILY_CHECK(tensor.begin == end && tensor.end >= tensor.begin);
      LILY_CHECK(tensor.name.size() <= kMaxTensorNameBytes && tensor.shape.size() <= kMaxTensorRank);
      end = tensor.end;
      if (tensor.dtype == Dtype::other) continue;
      // In floating point the product cannot wrap.
      double n_bytes = static_cast<double>(dtype_bytes(tensor.dtype));
      for (const int64_t dim : tensor.shape) n_bytes *= static_cast<double>(dim);
      LILY_CHECK(n_bytes == static_cast<double>(tensor.n_bytes()));
    }
    LILY_CHECK(end == header.data_bytes);
  } catch (const Error& error) {
    LILY_CHECK(std::string_view(error.what()).find('\n') == std::string_view::npos);
  }
  return 0;
}
