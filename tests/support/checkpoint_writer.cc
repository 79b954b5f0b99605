#include "tests/support/checkpoint_writer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <stdexcept>

#include "base/half.h"
#include "tests/support/temp_folder.h"

namespace lily::test {
namespace {

using model::Storage;
using model::Weight;
using model::WeightSpec;

// splitmix64: small, and the same everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  float uniform(float low, float high) {
    return low + (high - low) * static_cast<float>(next() >> 40) * 0x1p-24f;
  }

 private:
  uint64_t state_;
};

int64_t dtype_bytes(const std::string& dtype) {
  return dtype == "F32" || dtype == "U32" || dtype == "I32" ? 4 : 2;
}

int64_t product(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (const int64_t dim : shape) n *= dim;
  return n;
}

Tensor floats(std::string name, const std::string& dtype, std::vector<int64_t> shape,
              const std::function<float()>& value, bool is_sparse) {
  Tensor tensor{std::move(name), dtype, std::move(shape), {}};
  if (is_sparse) return tensor;
  const int64_t n = product(tensor.shape);
  tensor.data.resize(static_cast<size_t>(n * dtype_bytes(dtype)));
  for (int64_t i = 0; i < n; ++i) {
    const float x = value();
    const Bf16 bf16 = to_bf16(x);
    const F16 f16 = to_f16(x);
    std::byte* const out = tensor.data.data() + i * dtype_bytes(dtype);
    if (dtype == "BF16") std::memcpy(out, &bf16, 2);
    if (dtype == "F16") std::memcpy(out, &f16, 2);
    if (dtype == "F32") std::memcpy(out, &x, 4);
  }
  return tensor;
}

Tensor codes(std::string name, std::vector<int64_t> shape, Random& random, bool is_sparse) {
  Tensor tensor{std::move(name), "U32", std::move(shape), {}};
  if (is_sparse) return tensor;
  tensor.data.resize(static_cast<size_t>(tensor.n_bytes()));
  for (size_t i = 0; i < tensor.data.size(); i += 4) {
    const uint64_t word = random.next();
    std::memcpy(tensor.data.data() + i, &word, 4);
  }
  return tensor;
}

// Header without the length in front.
std::string header_json(const std::vector<const Tensor*>& tensors, bool odd_start) {
  nlohmann::json header = {{"__metadata__", {{"format", "mlx"}}}};
  int64_t offset = 0;
  for (const Tensor* tensor : tensors) {
    header[tensor->name] = {{"dtype", tensor->dtype},
                            {"shape", tensor->shape},
                            {"data_offsets", {offset, offset + tensor->n_bytes()}}};
    offset += tensor->n_bytes();
  }
  std::string json = header.dump();
  if (json.size() % 2 != (odd_start ? 1 : 0)) {
    header["__metadata__"]["pad"] = "";  // 9 characters more
    json = header.dump();
  }
  return json;
}

std::string length_bytes(uint64_t n) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(n >> (8 * i) & 0xff);
  return bytes;
}

void write_shard(const std::filesystem::path& path, const std::vector<const Tensor*>& tensors,
                 bool is_sparse) {
  const std::string json = header_json(tensors, true);
  std::ofstream out(path, std::ios::binary);
  out << length_bytes(json.size()) << json;
  int64_t n_data = 0;
  for (const Tensor* tensor : tensors) {
    n_data += tensor->n_bytes();
    if (!is_sparse)
      out.write(reinterpret_cast<const char*>(tensor->data.data()),
                static_cast<std::streamsize>(tensor->data.size()));
  }
  if (!out.flush()) throw std::runtime_error("cannot write " + path.string());
  out.close();
  if (is_sparse) std::filesystem::resize_file(path, 8 + json.size() + static_cast<uint64_t>(n_data));
}

}  // namespace

int64_t Tensor::n_bytes() const { return product(shape) * dtype_bytes(dtype); }

std::string safetensors_bytes(const std::vector<Tensor>& tensors, bool odd_start) {
  std::vector<const Tensor*> pointers;
  for (const Tensor& tensor : tensors) pointers.push_back(&tensor);
  const std::string json = header_json(pointers, odd_start);
  std::string bytes = length_bytes(json.size()) + json;
  for (const Tensor& tensor : tensors)
    bytes.append(reinterpret_cast<const char*>(tensor.data.data()), tensor.data.size());
  return bytes;
}

model::Dims small_dims() {
  return {.hidden = 64,
          .n_layers = 4,
          .attention_interval = 4,
          .vocab = 128,
          .n_q_heads = 2,
          .n_kv_heads = 1,
          .n_key_heads = 1,
          .n_value_heads = 2,
          .n_experts = 8,
          .expert_width = 64,
          .shared_width = 64,
          .rope_theta = 1e7,
          .max_positions = 4096};
}

nlohmann::json config_document(const model::Dims& dims) {
  nlohmann::json layer_types = nlohmann::json::array();
  for (int layer = 0; layer < dims.n_layers; ++layer)
    layer_types.push_back(dims.mixer(layer) == model::Mixer::attention ? "full_attention"
                                                                       : "linear_attention");
  nlohmann::json quantization = {{"group_size", 64}, {"bits", 4}, {"mode", "affine"}};
  for (int layer = 0; layer < dims.n_layers; ++layer)
    for (const char* gate : {"gate", "shared_expert_gate"})
      quantization["language_model.model.layers." + std::to_string(layer) + ".mlp." + gate] = {
          {"group_size", 64}, {"bits", 8}};
  return {{"architectures", {"Qwen3_5MoeForConditionalGeneration"}},
          {"model_type", "qwen3_5_moe"},
          {"tie_word_embeddings", false},
          {"eos_token_id", {dims.vocab - 2, dims.vocab - 1}},
          {"quantization", quantization},
          {"quantization_config", quantization},
          {"text_config",
           {{"model_type", "qwen3_5_moe_text"},
            {"attention_bias", false},
            {"attn_output_gate", true},
            {"eos_token_id", dims.vocab - 1},
            {"full_attention_interval", dims.attention_interval},
            {"head_dim", model::kHeadDim},
            {"hidden_act", "silu"},
            {"hidden_size", dims.hidden},
            {"layer_types", layer_types},
            {"linear_conv_kernel_dim", model::kConvTaps},
            {"linear_key_head_dim", model::kDeltaHeadDim},
            {"linear_num_key_heads", dims.n_key_heads},
            {"linear_num_value_heads", dims.n_value_heads},
            {"linear_value_head_dim", model::kDeltaHeadDim},
            {"mamba_ssm_dtype", "float32"},
            {"max_position_embeddings", dims.max_positions},
            {"mlp_only_layers", nlohmann::json::array()},
            {"moe_intermediate_size", dims.expert_width},
            {"num_attention_heads", dims.n_q_heads},
            {"num_experts", dims.n_experts},
            {"num_experts_per_tok", model::kExpertsPerToken},
            {"num_hidden_layers", dims.n_layers},
            {"num_key_value_heads", dims.n_kv_heads},
            {"rms_norm_eps", 1e-6},
            {"rope_parameters",
             {{"mrope_interleaved", true},
              {"mrope_section", {11, 11, 10}},
              {"partial_rotary_factor", 0.25},
              {"rope_theta", dims.rope_theta},
              {"rope_type", "default"}}},
            {"shared_expert_intermediate_size", dims.shared_width},
            {"tie_word_embeddings", false},
            {"vocab_size", dims.vocab}}}};
}

CheckpointWriter::CheckpointWriter(Options options) : options_(std::move(options)) {
  const model::Dims& dims = options_.dims;
  config = config_document(dims);
  generation_config = {{"do_sample", true},
                       {"temperature", 1.0},
                       {"top_k", 20},
                       {"top_p", 0.95},
                       {"eos_token_id", dims.vocab - 2}};
  if (options_.is_tied) config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = true;

  Random random(options_.seed);
  const auto step = [&] { return (random.next() & 1 ? 1.0f : -1.0f) * random.uniform(0.001f, 0.01f); };
  const auto offset = [&] { return random.uniform(-0.1f, 0.1f); };
  const auto around_one = [&] { return random.uniform(0.8f, 1.2f); };
  for (const WeightSpec& spec : model::catalogue(dims)) {
    if (options_.is_tied && spec.id.weight == Weight::lm_head) continue;
    const bool in_model = spec.name.rfind("model.", 0) == 0;
    const std::string name =
        in_model ? options_.model_prefix + spec.name.substr(6) : options_.head_prefix + spec.name;
    if (!spec.quantisable) {
      const bool is_bare = spec.id.weight == Weight::a_log || spec.id.weight == Weight::dt_bias;
      std::vector<int64_t> shape = spec.shape;
      if (spec.id.weight == Weight::conv) shape.push_back(1);
      const bool is_norm = spec.id.weight != Weight::conv && !is_bare;
      tensors.push_back(floats(is_bare ? name : name + ".weight", options_.value_dtype, shape,
                               is_norm ? std::function<float()>(around_one) : std::function<float()>(offset),
                               options_.is_sparse));
      continue;
    }
    const Storage storage =
        options_.storage ? options_.storage(spec.id) : model::published_storage(spec.id.weight);
    if (storage == Storage::bf16) {
      tensors.push_back(
          floats(name + ".weight", options_.value_dtype, spec.shape, offset, options_.is_sparse));
      continue;
    }
    std::vector<int64_t> packed = spec.shape, groups = spec.shape;
    packed.back() = spec.shape.back() / (storage == Storage::q4 ? 8 : 4);
    groups.back() = spec.shape.back() / model::kQuantGroup;
    tensors.push_back(codes(name + ".weight", packed, random, options_.is_sparse));
    tensors.push_back(floats(name + ".scales", options_.scale_dtype, groups, step, options_.is_sparse));
    tensors.push_back(floats(name + ".biases", options_.scale_dtype, groups, offset, options_.is_sparse));
  }
}

Tensor& CheckpointWriter::tensor(const std::string& name) {
  for (Tensor& tensor : tensors)
    if (tensor.name == name) return tensor;
  throw std::runtime_error("no tensor " + name);
}

void CheckpointWriter::remove(const std::string& name) {
  const Tensor* found = &tensor(name);
  tensors.erase(tensors.begin() + (found - tensors.data()));
}

void CheckpointWriter::write(const std::filesystem::path& folder) const {
  std::filesystem::create_directories(folder);
  write_file(folder / "config.json", config.dump(2));
  if (!generation_config.is_null()) write_file(folder / "generation_config.json", generation_config.dump(2));

  std::vector<const Tensor*> order;
  for (const Tensor& tensor : tensors) order.push_back(&tensor);
  const auto hash = [&](const Tensor* tensor) {
    uint64_t h = 0xcbf29ce484222325u;
    for (const char c : tensor->name) h = (h ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
    return h;
  };
  std::sort(order.begin(), order.end(), [&](const Tensor* a, const Tensor* b) { return hash(a) < hash(b); });
  std::vector<std::vector<const Tensor*>> shards(static_cast<size_t>(options_.n_shards));
  for (size_t i = 0; i < order.size(); ++i) shards[i * shards.size() / order.size()].push_back(order[i]);

  nlohmann::json weight_map = nlohmann::json::object();
  int64_t total_size = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    char name[64];
    std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", i + 1, shards.size());
    const std::string file = shards.size() == 1 ? "model.safetensors" : name;
    write_shard(folder / file, shards[i], options_.is_sparse);
    for (const Tensor* tensor : shards[i]) {
      weight_map[tensor->name] = file;
      total_size += tensor->n_bytes();
    }
  }
  const nlohmann::json index = {{"metadata", {{"total_size", total_size}}}, {"weight_map", weight_map}};
  write_file(folder / "model.safetensors.index.json", index.dump(2));
}

std::vector<double> values_of(const Tensor& tensor) {
  std::vector<double> values;
  for (size_t i = 0; i < tensor.data.size(); i += static_cast<size_t>(dtype_bytes(tensor.dtype))) {
    Bf16 bf16;
    F16 f16;
    float f32 = 0;
    std::memcpy(&bf16, tensor.data.data() + i, 2);
    std::memcpy(&f16, tensor.data.data() + i, 2);
    if (tensor.dtype == "F32") std::memcpy(&f32, tensor.data.data() + i, 4);
    values.push_back(tensor.dtype == "BF16" ? to_float(bf16) : tensor.dtype == "F16" ? to_float(f16) : f32);
  }
  return values;
}

std::vector<double> dequantised_row(const std::vector<Tensor>& tensors, const std::string& name, int bits,
                                    int64_t row) {
  std::map<std::string, const Tensor*> found;
  for (const Tensor& tensor : tensors)
    if (tensor.name.rfind(name + ".", 0) == 0) found[tensor.name.substr(name.size() + 1)] = &tensor;
  const Tensor& packed = *found.at("weight");
  const std::vector<double> scales = values_of(*found.at("scales")), biases = values_of(*found.at("biases"));
  const int64_t row_words = packed.shape.back(), n_in = row_words * 32 / bits;
  std::vector<double> out;
  for (int64_t j = 0; j < n_in; ++j) {
    uint32_t word = 0;
    std::memcpy(&word, packed.data.data() + (row * row_words + j * bits / 32) * 4, 4);
    const uint32_t code = word >> (j * bits % 32) & ((1u << bits) - 1);
    const auto group = static_cast<size_t>(row * (n_in / 64) + j / 64);
    out.push_back(scales[group] * code + biases[group]);
  }
  return out;
}

}  // namespace lily::test
