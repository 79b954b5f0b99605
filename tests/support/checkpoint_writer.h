// Small checkpoints for tests, written as MLX writes them: tensors in hash order, no padding anywhere, data
// at odd addresses, a module's tensors in different shards. Values are random; the same seed gives the same
// bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/dims.h"
#include "model/weight.h"

namespace lily::test {

struct Tensor {
  std::string name;
  std::string dtype;  // BF16, F16, F32, U32, I32
  std::vector<int64_t> shape;
  std::vector<std::byte> data;  // empty in a sparse checkpoint
  int64_t n_bytes() const;      // by type and shape
};

// A file in memory. Header keys are sorted; the data follows the order of `tensors`. With odd_start the
// metadata is padded so that the data begins at an odd offset.
std::string safetensors_bytes(const std::vector<Tensor>& tensors, bool odd_start = true);

// The smallest model with every kind of layer: 4 layers, hidden 64, 8 experts of width 64, 128 tokens.
model::Dims small_dims();

// A config.json document in the form of the real one, with the overrides for the two gates.
nlohmann::json config_document(const model::Dims& dims);

class CheckpointWriter {
 public:
  struct Options {
    model::Dims dims = small_dims();
    uint64_t seed = 1;
    int n_shards = 1;
    std::string model_prefix = "language_model.model.";  // before "layers.0..."
    std::string head_prefix = "language_model.";         // before "lm_head..."
    std::function<model::Storage(model::WeightId)> storage =
        {};                            // of linear weights; empty: published_storage
    std::string scale_dtype = "BF16";  // of scales and biases
    std::string value_dtype = "BF16";  // of unquantised weights and small vectors
    bool is_tied = false;              // no lm_head
    bool is_sparse = false;            // files of the right size without data (holes)
  };
  explicit CheckpointWriter(Options options);

  // To be changed at will before write().
  std::vector<Tensor> tensors;
  nlohmann::json config, generation_config;

  Tensor& tensor(const std::string& name);  // by its whole name; aborts the test if there is none
  void remove(const std::string& name);
  void write(const std::filesystem::path& folder) const;

 private:
  Options options_;
};

// Elements of a tensor of type BF16, F16 or F32.
std::vector<double> values_of(const Tensor& tensor);
// Row `row`, counted over all leading dimensions, of the quantised module `name` in `tensors`, computed in
// double from the definition: w = scale * code + bias.
std::vector<double> dequantised_row(const std::vector<Tensor>& tensors, const std::string& name, int bits,
                                    int64_t row);

}  // namespace lily::test
