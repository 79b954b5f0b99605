#include "model/synth.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/half.h"
#include "model/weight.h"

namespace lily::model {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* kPrefix = "language_model.";
constexpr int64_t kWriteBytes = int64_t{4}
                                << 20;  // generated and written at once; a multiple of every element size

// SplitMix64's finaliser: a bijection that mixes all bits.
uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// FNV-1a.
uint64_t hash(std::string_view text) {
  uint64_t h = 0xCBF29CE484222325u;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return h;
}

// A number in [0, 1) with 24 bits.
float unit(uint64_t bits) { return static_cast<float>(bits >> 40) * 0x1p-24f; }

// The share of an embedding row that all rows have in common, as RMS; its square and that of the random part
// sum to 1.
constexpr float kCommonRms = 0.3f, kRandomRms = 0.954f;

// Standard deviation of a linear weight's product with an input of RMS 1.
float gain(Weight weight) {
  switch (weight) {
    case Weight::o_proj:
    case Weight::delta_out:
      return 0.3f;
    case Weight::expert_down:
    case Weight::shared_down_proj:
      return 0.4f;
    default:
      return 1.0f;
  }
}

struct Tensor {
  enum class Kind { codes, scales, biases, plain };
  Kind kind;
  WeightId id;
  std::string name, dtype;
  std::vector<int64_t> shape;
  int64_t n_bytes;
  int64_t offset = 0;  // in its shard's data
};

// Exact in float for the sizes that occur: Newton's iteration from above, without the library's sqrt.
float inverse_sqrt(int64_t n) {
  double x = 1.0;
  const auto target = static_cast<double>(n);
  for (int i = 0; i < 64; ++i) x = 0.5 * (x + target / x);
  return static_cast<float>(1.0 / x);
}

class Generator {
 public:
  Generator(uint64_t seed, const Tensor& tensor)
      : tensor_(tensor),
        module_key_(mix(seed ^ hash(module_name(tensor)))),
        key_(mix(seed ^ hash(tensor.name))) {
    const bool is_8_bit = published_storage(tensor.id.weight) == Storage::q8;
    const int64_t in =
        tensor.shape.back() * (tensor.kind == Tensor::Kind::codes ? (is_8_bit ? 4 : 8) : kQuantGroup);
    n_groups_in_row_ = in / kQuantGroup;
    // Codes are uniform: their standard deviation is (levels^2 - 1) / 12 under the root.
    const float code_deviation = is_8_bit ? 73.9f : 4.61f;
    const bool is_embedding = tensor.id.weight == Weight::embed;
    step_ = is_embedding ? kRandomRms / code_deviation
                         : gain(tensor.id.weight) * inverse_sqrt(in) / code_deviation;
    middle_code_ = is_8_bit ? 127.5f : 7.5f;
    if (tensor.id.weight == Weight::router && tensor.kind == Tensor::Kind::biases) {
      codes_key_ = mix(seed ^ hash(module_name(tensor) + ".weight"));
      preferences_ = preferences(tensor.shape.front(), in);
    }
  }

  // Fills bytes [first, first + out.size()) of the tensor.
  void fill(int64_t first, std::span<std::byte> out) const {
    switch (tensor_.kind) {
      case Tensor::Kind::codes:
        for (size_t i = 0; i < out.size(); i += 8) {
          const uint64_t bits = mix(key_ + static_cast<uint64_t>(first) / 8 + i / 8);
          std::memcpy(out.data() + i, &bits, std::min<size_t>(8, out.size() - i));
        }
        return;
      case Tensor::Kind::scales:
        for (size_t i = 0; i < out.size(); i += 2)
          put(out, i, scale(first / 2 + static_cast<int64_t>(i) / 2));
        return;
      case Tensor::Kind::biases:
        for (size_t i = 0; i < out.size(); i += 2) put(out, i, bias(first / 2 + static_cast<int64_t>(i) / 2));
        return;
      case Tensor::Kind::plain:
        for (size_t i = 0; i < out.size(); i += 2)
          put(out, i, plain(first / 2 + static_cast<int64_t>(i) / 2));
        return;
    }
  }

 private:
  static std::string module_name(const Tensor& t) { return t.name.substr(0, t.name.rfind('.')); }
  static void put(std::span<std::byte> out, size_t at, float value) {
    const Bf16 half = to_bf16(value);
    std::memcpy(out.data() + at, &half, 2);
  }

  // Between 3/4 and 5/4 of the step, negative for one group in four. Scales and biases are drawn from the
  // module's key, so that both tensors know the scale.
  float scale(int64_t group) const {
    const uint64_t bits = mix(module_key_ + static_cast<uint64_t>(group));
    const float magnitude = step_ * (0.75f + 0.5f * unit(bits));
    return bf16_rounded((bits & 3) == 0 ? -magnitude : magnitude);
  }
  float bias(int64_t group) const {
    if (!preferences_.empty()) return router_bias(group);
    float b = -middle_code_ * scale(group);
    if (tensor_.id.weight == Weight::embed) {
      b += common_sign(group) * kCommonRms;
    }
    return b;
  }
  // Of the part that all embedding rows share.
  float common_sign(int64_t group) const {
    const uint64_t bits = mix(hash("common") + static_cast<uint64_t>(group % n_groups_in_row_));
    return (bits & 1) == 0 ? 1.0f : -1.0f;
  }
  // How much each expert likes the common part: the quantiles of a distribution much like the normal one,
  // shuffled. Drawn one by one, the largest of 256 would differ too much between layers.
  std::vector<double> preferences(int64_t n_experts, int64_t in) const {
    std::vector<std::pair<uint64_t, int64_t>> order;
    for (int64_t e = 0; e < n_experts; ++e)
      order.emplace_back(mix(module_key_ ^ mix(static_cast<uint64_t>(e))), e);
    std::sort(order.begin(), order.end());
    std::vector<double> result(order.size());
    for (size_t rank = 0; rank < order.size(); ++rank) {
      const double x = static_cast<double>(2 * static_cast<int64_t>(rank) + 1 - n_experts) /
                       static_cast<double>(n_experts);  // in (-1, 1)
      const double x4 = (x * x) * (x * x);
      // A fused multiply-add by name: one that the compiler puts in on some machines rounds otherwise.
      const double quantile = x * std::fma(1.625, x4 * x4, 1.25);
      result[static_cast<size_t>(order[rank].second)] = quantile / static_cast<double>(in);
    }
    return result;
  }
  // The codes of a group have no say on the common part, which is constant in it: the bias takes their mean
  // off.
  float router_bias(int64_t group) const {
    constexpr int64_t kWords = kQuantGroup / 8;  // of 8-bit codes
    uint64_t sum = 0;
    for (int64_t word = group * kWords; word < (group + 1) * kWords; ++word)
      for (uint64_t bits = mix(codes_key_ + static_cast<uint64_t>(word)); bits != 0; bits >>= 8)
        sum += bits & 0xff;
    const double mean = static_cast<double>(sum) / kQuantGroup;
    const double preference = preferences_[static_cast<size_t>(group / n_groups_in_row_)];
    return static_cast<float>(std::fma(-mean, double{scale(group)}, common_sign(group) * preference));
  }
  float plain(int64_t element) const {
    const float u = unit(mix(key_ + static_cast<uint64_t>(element)));
    switch (tensor_.id.weight) {
      case Weight::a_log:
        return 2.5f * u;  // decay rates of 1 to 12
      case Weight::dt_bias:
        return -6.0f + 4.0f * u;  // steps of 0.002 to 0.13
      case Weight::conv:
        return u - 0.5f;
      default:
        return 0.9f + 0.2f * u;  // norms
    }
  }

  const Tensor& tensor_;
  uint64_t module_key_, key_, codes_key_ = 0;
  int64_t n_groups_in_row_ = 1;
  float step_ = 0, middle_code_ = 0;
  std::vector<double> preferences_;  // [experts], of a router's biases
};

std::vector<Tensor> tensors_of(const Dims& dims) {
  std::vector<Tensor> tensors;
  for (const WeightSpec& spec : catalogue(dims)) {
    const std::string name = kPrefix + spec.name;
    const Storage storage = published_storage(spec.id.weight);
    if (!spec.quantisable) {
      std::vector<int64_t> shape = spec.shape;
      if (spec.id.weight == Weight::conv) shape.push_back(1);
      const bool has_suffix = spec.id.weight != Weight::a_log && spec.id.weight != Weight::dt_bias;
      tensors.push_back({Tensor::Kind::plain, spec.id, name + (has_suffix ? ".weight" : ""), "BF16", shape,
                         spec.n_elements() * 2});
      continue;
    }
    const int bits = storage == Storage::q8 ? 8 : 4;
    std::vector<int64_t> codes = spec.shape, groups = spec.shape;
    codes.back() = codes.back() * bits / 32;
    groups.back() /= kQuantGroup;
    const int64_t n_groups = spec.n_elements() / kQuantGroup;
    tensors.push_back(
        {Tensor::Kind::codes, spec.id, name + ".weight", "U32", codes, spec.n_elements() * bits / 8});
    tensors.push_back({Tensor::Kind::scales, spec.id, name + ".scales", "BF16", groups, n_groups * 2});
    tensors.push_back({Tensor::Kind::biases, spec.id, name + ".biases", "BF16", groups, n_groups * 2});
  }
  return tensors;
}

struct Shard {
  std::vector<Tensor> tensors;
  int64_t n_bytes = 0;
  std::string file_name, header;
};

// Fills shards in catalogue order and orders the tensors inside each by hash, as the published files are.
std::vector<Shard> make_shards(const Dims& dims, int64_t max_bytes) {
  std::vector<Shard> shards(1);
  for (Tensor& tensor : tensors_of(dims)) {
    if (shards.back().n_bytes > 0 && shards.back().n_bytes + tensor.n_bytes > max_bytes)
      shards.emplace_back();
    shards.back().n_bytes += tensor.n_bytes;
    shards.back().tensors.push_back(std::move(tensor));
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    Shard& shard = shards[i];
    shard.file_name = shards.size() == 1
                          ? "model.safetensors"
                          : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    std::sort(shard.tensors.begin(), shard.tensors.end(),
              [](const Tensor& a, const Tensor& b) { return mix(hash(a.name)) < mix(hash(b.name)); });
    int64_t offset = 0;
    nlohmann::json header;  // keys sorted
    header["__metadata__"] = {{"format", "mlx"}};
    for (Tensor& tensor : shard.tensors) {
      tensor.offset = offset;
      offset += tensor.n_bytes;
      header[tensor.name] = {
          {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {tensor.offset, offset}}};
    }
    shard.header = header.dump();
    // The real files' data starts at odd offsets; readers that cast pointers shall notice. One space is legal
    // padding.
    if ((8 + shard.header.size()) % 2 == 0) shard.header += ' ';
  }
  return shards;
}

Json config_json(const Dims& d) {
  Json quantization = {{"group_size", kQuantGroup}, {"bits", 4}, {"mode", "affine"}};
  Json layer_types = Json::array();
  for (int layer = 0; layer < d.n_layers; ++layer) {
    for (const char* gate : {"gate", "shared_expert_gate"})
      quantization[fmt::format("{}model.layers.{}.mlp.{}", kPrefix, layer, gate)] = {
          {"group_size", kQuantGroup}, {"bits", 8}};
    layer_types.push_back(d.mixer(layer) == Mixer::attention ? "full_attention" : "linear_attention");
  }
  const Json text = {{"model_type", "qwen3_5_moe_text"},
                     {"hidden_size", d.hidden},
                     {"num_hidden_layers", d.n_layers},
                     {"full_attention_interval", d.attention_interval},
                     {"layer_types", layer_types},
                     {"vocab_size", d.vocab},
                     {"num_attention_heads", d.n_q_heads},
                     {"num_key_value_heads", d.n_kv_heads},
                     {"head_dim", kHeadDim},
                     {"partial_rotary_factor", static_cast<double>(kRotaryDim) / kHeadDim},
                     {"rope_parameters",
                      {{"rope_type", "default"},
                       {"rope_theta", static_cast<int64_t>(d.rope_theta)},
                       {"partial_rotary_factor", static_cast<double>(kRotaryDim) / kHeadDim},
                       {"mrope_section", {11, 11, 10}},
                       {"mrope_interleaved", true}}},
                     {"linear_num_key_heads", d.n_key_heads},
                     {"linear_num_value_heads", d.n_value_heads},
                     {"linear_key_head_dim", kDeltaHeadDim},
                     {"linear_value_head_dim", kDeltaHeadDim},
                     {"linear_conv_kernel_dim", kConvTaps},
                     {"num_experts", d.n_experts},
                     {"num_experts_per_tok", kExpertsPerToken},
                     {"moe_intermediate_size", d.expert_width},
                     {"shared_expert_intermediate_size", d.shared_width},
                     {"rms_norm_eps", 1e-6},
                     {"max_position_embeddings", d.max_positions},
                     {"attention_bias", false},
                     {"attn_output_gate", true},
                     {"hidden_act", "silu"},
                     {"mamba_ssm_dtype", "float32"},
                     {"tie_word_embeddings", false},
                     {"dtype", "bfloat16"}};
  return {{"architectures", {"Qwen3_5MoeForConditionalGeneration"}},
          {"model_type", "qwen3_5_moe"},
          {"text_config", text},
          {"tie_word_embeddings", false},
          {"quantization", quantization},
          {"quantization_config", quantization}};
}

void write_text(const fs::path& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << text;
  out.close();
  if (!out) fail(Fault::device, "{}: cannot be written: {}", path.string(), std::strerror(errno));
}

// A file written by position from several threads.
class OutputFile {
 public:
  explicit OutputFile(fs::path path)
      : path_(std::move(path)), fd_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) {
    if (fd_ < 0) fail(Fault::device, "{}: cannot be created: {}", path_.string(), std::strerror(errno));
  }
  ~OutputFile() { ::close(fd_); }
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write_at(int64_t offset, std::span<const std::byte> bytes) const {
    while (!bytes.empty()) {
      const ssize_t n = ::pwrite(fd_, bytes.data(), bytes.size(), offset);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0)
        fail(Fault::device, "{}: cannot be written at byte {}: {}", path_.string(), offset,
             std::strerror(errno));
      bytes = bytes.subspan(static_cast<size_t>(n));
      offset += n;
    }
  }

 private:
  fs::path path_;
  int fd_;
};

struct TensorPart {
  const Tensor* tensor;
  int64_t first, n_bytes;  // in the tensor
};

}  // namespace

int64_t synthetic_bytes(const Dims& dims) {
  int64_t sum = 0;
  for (const Tensor& tensor : tensors_of(dims)) sum += tensor.n_bytes;
  return sum;
}

void write_synthetic(const Dims& dims, const fs::path& folder, const SynthOptions& options, ThreadPool& pool,
                     const std::function<bool(int64_t, int64_t)>& progress) {
  std::error_code failed;
  fs::create_directories(folder, failed);
  if (failed) fail(Fault::user, "{}: cannot be created: {}", folder.string(), failed.message());
  if (!fs::is_empty(folder, failed) || failed)
    fail(Fault::user, "{}: is not empty; remove what is in it or choose another folder", folder.string());
  const std::vector<Shard> shards = make_shards(dims, options.max_shard_bytes);
  const int64_t total = synthetic_bytes(dims);
  const auto space = fs::space(folder, failed);
  if (!failed && static_cast<int64_t>(space.available) < total)
    fail(Fault::user, "{}: {} bytes are needed and {} are free", folder.string(), total, space.available);

  std::vector<fs::path> written;
  try {
    std::atomic<int64_t> done{0};
    Json weight_map;
    for (const Shard& shard : shards) {
      written.push_back(folder / shard.file_name);
      const OutputFile file(written.back());
      const uint64_t header_bytes = shard.header.size();  // little-endian on every machine this runs on
      file.write_at(0, std::as_bytes(std::span(&header_bytes, 1)));
      file.write_at(8, std::as_bytes(std::span(shard.header)));
      const auto data_start = static_cast<int64_t>(8 + shard.header.size());

      std::vector<TensorPart> pieces;
      for (const Tensor& tensor : shard.tensors) {
        weight_map[tensor.name] = shard.file_name;
        for (int64_t first = 0; first < tensor.n_bytes; first += kWriteBytes)
          pieces.push_back({&tensor, first, std::min(kWriteBytes, tensor.n_bytes - first)});
      }
      std::atomic<size_t> next{0};
      std::atomic<bool> cancelled{false};
      pool.run([&](int thread) {
        std::vector<std::byte> bytes(static_cast<size_t>(kWriteBytes));
        for (size_t i; !cancelled && (i = next.fetch_add(1)) < pieces.size();) {
          const TensorPart& piece = pieces[i];
          const auto out = std::span(bytes).first(static_cast<size_t>(piece.n_bytes));
          Generator(options.seed, *piece.tensor).fill(piece.first, out);
          file.write_at(data_start + piece.tensor->offset + piece.first, out);
          done += piece.n_bytes;
          if (thread == 0 && progress && !progress(done, total)) cancelled = true;
        }
      });
      if (cancelled)
        fail(Fault::user, "interrupted; what was written of {} has been removed", folder.string());
    }
    if (progress) progress(total, total);
    const Json index = {{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}};
    written.push_back(folder / "model.safetensors.index.json");
    write_text(written.back(), index.dump(2) + "\n");
    written.push_back(folder / "generation_config.json");
    write_text(
        written.back(),
        Json{{"do_sample", true}, {"temperature", 1.0}, {"top_k", 20}, {"top_p", 0.95}}.dump(2) + "\n");
    // Last: a folder without it is not a checkpoint.
    written.push_back(folder / "config.json");
    write_text(written.back(), config_json(dims).dump(2) + "\n");
  } catch (...) {
    for (const fs::path& path : written) fs::remove(path, failed);
    throw;
  }
}

}  // namespace lily::model
