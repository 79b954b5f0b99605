// A checkpoint folder, checked against the catalogue: for every weight, where its bytes are and how they are
// stored (docs/formats.md). Opening reads headers only; weight_store.h and weight_stream.h read the weights.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "model/config.h"
#include "model/safetensors.h"
#include "model/weight.h"

namespace lily::model {

// One tensor of a file.
struct Part {
  int file = -1;
  Dtype dtype = Dtype::other;
  uint64_t offset = 0;  // in the file, at any alignment
  int64_t n_bytes = 0;  // 0: the weight has no such part
  std::string name;     // as in the file, for messages
};

// q4 and q8 have codes, scales and biases; bf16 and f32 (small vectors) have values, which may be BF16, F16
// or F32 in the file whatever `storage` says: that is what they are once loaded.
struct StoredWeight {
  Storage storage = Storage::bf16;
  std::vector<int64_t> shape;  // logical, as in WeightSpec
  Part codes, scales, biases, values;
  int64_t n_bytes() const { return codes.n_bytes + scales.n_bytes + biases.n_bytes + values.n_bytes; }
};

enum class TensorClass : uint8_t {
  embedding,
  head,
  experts,
  shared_expert,
  attention,
  delta,
  router,
  norms,
  vision,
  mtp,
  other
};
inline constexpr int kTensorClasses = static_cast<int>(TensorClass::other) + 1;
std::string_view to_string(TensorClass tensor_class);
TensorClass tensor_class(Weight weight);

// What `lily inspect` shows.
struct CheckpointReport {
  struct Tensor {
    std::string name;  // as in the file
    std::string file;
    std::vector<int64_t> shape;
    std::string dtype;
    int bits = 0, group_size = 0;  // of the quantised module it belongs to; 0 if it belongs to none
    int64_t n_bytes = 0;
    TensorClass tensor_class = TensorClass::other;  // other: nothing this program uses
  };
  // A draft head (multi-token prediction) is reported, not loaded.
  enum class Mtp { absent, available, unsupported_layout };

  std::optional<Config> config;  // nothing if config.json could not be read
  std::vector<Tensor> tensors;   // by name
  std::array<int64_t, kTensorClasses> bytes_by_class{};
  int64_t n_text_tensors = 0, text_bytes = 0;  // what the text model uses
  Mtp mtp = Mtp::absent;
  std::vector<std::string> notices, problems;  // one line each; no problems: the checkpoint can be opened
};

// Collects as much as the folder lets it; throws only if there is no such folder.
CheckpointReport inspect_checkpoint(const std::filesystem::path& folder);

class Checkpoint {
 public:
  // Throws one error that names the first of what matters most and up to 10 tensors in the same case. Notices
  // are logged.
  static Checkpoint open(const std::filesystem::path& folder);

  // Forgets all layers but [first, first + n), which become layers 0 .. n - 1: a part of the model with
  // embedding, norm and head of the whole, to be read where the whole has no room. `first` is a multiple of
  // attention_interval, so that every layer keeps its kind. id() stays the whole's.
  void keep_layers(int first, int n);

  const std::filesystem::path& folder() const { return folder_; }
  const Config& config() const { return *report_.config; }
  const Dims& dims() const { return config().dims; }
  const CheckpointReport& report() const { return report_; }

  // The weight whose bytes hold this one: embed for the lm_head of tied embeddings, else the same.
  WeightId source(WeightId id) const;
  const StoredWeight& weight(WeightId id) const;  // one of the catalogue's

  // Fills `out` from byte `offset` of the part. Any thread.
  void read(const Part& part, int64_t offset, std::span<std::byte> out) const;
  // To be called when a weight has been read: weights are read once and kept, and a second copy in the page
  // cache would double the memory. Large reads give their pages back by themselves.
  void release_cached(const StoredWeight& weight) const;

  // Identity for cache keys: a hash of config, headers, sizes and samples of the data. Reads 1 MB or so.
  std::string id() const;

 private:
  Checkpoint() = default;

  std::filesystem::path folder_;
  CheckpointReport report_;
  std::string config_text_;
  std::vector<File> files_;
  std::vector<std::string> headers_;
  std::vector<StoredWeight> weights_;  // by weight_index()
};

}  // namespace lily::model
