#include "model/config.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "base/printable.h"
#include "model/json_strict.h"

namespace lily::model {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxDim = int64_t{1} << 20;
// <|im_end|> ends a chat turn and <|endoftext|> a document; config.json alone names only the second.
constexpr int32_t kImEnd = 248046, kEndOfText = 248044;

std::string shown(const Json& value) { return printable(value.dump(-1, ' ', true)); }

// One object of a file, with the path by which messages name its keys. A null value counts as absent.
class Section {
 public:
  Section(const Json& object, std::string file, std::string path)
      : object_(&object), file_(std::move(file)), path_(std::move(path)) {}

  const Json* find(const char* key) const {
    const auto it = object_->find(key);
    return it == object_->end() || it->is_null() ? nullptr : &*it;
  }

  std::string name(const char* key) const { return fmt::format("{}: {}{}", file_, path_, key); }

  std::optional<Section> object(const char* key) const {
    const Json* value = find(key);
    if (!value) return std::nullopt;
    if (!value->is_object()) fail(Fault::model, "{}: expected an object, found {}", name(key), shown(*value));
    return Section(*value, file_, path_ + key + ".");
  }

  std::optional<int64_t> maybe_integer(const char* key, int64_t min, int64_t max) const {
    const Json* value = find(key);
    if (!value) return std::nullopt;
    // Both tests: get<int64_t>() of a number that is larger than any int64_t would wrap.
    const bool in_int64 =
        value->is_number_integer() &&
        (!value->is_number_unsigned() || value->get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX));
    if (!in_int64 || value->get<int64_t>() < min || value->get<int64_t>() > max)
      fail(Fault::model, "{}: expected an integer from {} to {}, found {}", name(key), min, max,
           shown(*value));
    return value->get<int64_t>();
  }

  int dim(const char* key, int64_t max = kMaxDim) const {
    const std::optional<int64_t> value = maybe_integer(key, 1, max);
    if (!value) fail(Fault::model, "{} is missing", name(key));
    return static_cast<int>(*value);
  }

  std::optional<double> maybe_number(const char* key) const {
    const Json* value = find(key);
    if (!value) return std::nullopt;
    if (!value->is_number()) fail(Fault::model, "{}: expected a number, found {}", name(key), shown(*value));
    return value->get<double>();
  }

  std::optional<bool> maybe_flag(const char* key) const {
    const Json* value = find(key);
    if (!value) return std::nullopt;
    if (!value->is_boolean())
      fail(Fault::model, "{}: expected true or false, found {}", name(key), shown(*value));
    return value->get<bool>();
  }

  std::optional<std::string> maybe_text(const char* key) const {
    const Json* value = find(key);
    if (!value) return std::nullopt;
    if (!value->is_string()) fail(Fault::model, "{}: expected a string, found {}", name(key), shown(*value));
    return value->get<std::string>();
  }

  // A constant that kernels are specialised on. An absent key has the architecture's default, which is the
  // constant.
  void expect(const char* key, const Json& constant) const {
    const Json* value = find(key);
    if (value && *value != constant)
      fail(Fault::model,
           "{}: expected {}, found {}; lily runs Qwen3.6-35B-A3B and models of the same architecture",
           name(key), shown(constant), shown(*value));
  }

 private:
  const Json* object_;
  std::string file_, path_;
};

void check_architecture(const Section& root, const Section& text) {
  for (const Section* section : {&root, &text}) {
    const std::optional<std::string> type = section->maybe_text("model_type");
    if (!type || *type == "qwen3_5_moe" || *type == "qwen3_5_moe_text") continue;
    const bool is_dense = *type == "qwen3_5" || *type == "qwen3_5_text";
    fail(Fault::model, "{}: expected \"qwen3_5_moe\", found \"{}\"{}", section->name("model_type"),
         printable(*type),
         is_dense ? "; the dense models of the family are not supported" : "; is this Qwen3.6-35B-A3B?");
  }
  if (!root.find("model_type") && !text.find("model_type"))
    fail(Fault::model, "{} is missing; expected \"qwen3_5_moe\"", root.name("model_type"));
  const Json* n_experts = text.find("num_experts");
  if (!n_experts || *n_experts == 0)
    fail(Fault::model, "{}: expected 8 or more, found {}; the dense models of the family are not supported",
         text.name("num_experts"), n_experts ? "0" : "nothing");
}

void check_constants(const Section& text) {
  text.expect("head_dim", kHeadDim);
  text.expect("linear_key_head_dim", kDeltaHeadDim);
  text.expect("linear_value_head_dim", kDeltaHeadDim);
  text.expect("linear_conv_kernel_dim", kConvTaps);
  text.expect("num_experts_per_tok", kExpertsPerToken);
  text.expect("full_attention_interval", Dims{}.attention_interval);
  text.expect("hidden_act", "silu");
  text.expect("attention_bias", false);
  text.expect("attn_output_gate", true);
  text.expect("norm_topk_prob", true);
  text.expect("decoder_sparse_step", 1);
  text.expect("mlp_only_layers", Json::array());
  if (const auto epsilon = text.maybe_number("rms_norm_eps");
      epsilon && static_cast<float>(*epsilon) != kNormEpsilon)
    text.expect("rms_norm_eps", 1e-6);
  if (const auto gate = text.maybe_text("output_gate_type"); gate && *gate != "silu")
    text.expect("output_gate_type", "swish");
}

void check_layer_types(const Section& text, const Dims& dims) {
  const Json* types = text.find("layer_types");
  if (!types) return;
  if (!types->is_array() || types->size() != static_cast<size_t>(dims.n_layers))
    fail(Fault::model, "{}: expected a list of {} names", text.name("layer_types"), dims.n_layers);
  for (int layer = 0; layer < dims.n_layers; ++layer) {
    const char* expected = dims.mixer(layer) == Mixer::attention ? "full_attention" : "linear_attention";
    const Json& found = (*types)[layer];
    if (found != expected)
      fail(Fault::model, "{}[{}]: expected \"{}\" (every {}th layer is full attention), found {}",
           text.name("layer_types"), layer, expected, dims.attention_interval, shown(found));
  }
}

void check_rope_type(const Section& rope) {
  for (const char* key : {"rope_type", "type"}) {
    const auto type = rope.maybe_text(key);
    if (type && *type != "default" && *type != "mrope")
      fail(Fault::model,
           "{}: expected \"default\" or \"mrope\", found \"{}\"; YaRN and other scaled rotations are not "
           "supported, "
           "use the checkpoint's native context",
           rope.name(key), printable(*type));
  }
}

// Rotation settings have moved between releases: the innermost place that has a value counts.
void read_rope(const Section& root, const Section& text, Dims& dims) {
  std::vector<Section> places;
  for (const Section* section : {&text, &root}) {
    for (const char* key : {"rope_parameters", "rope_scaling"}) {
      const std::optional<Section> inner = section->object(key);
      if (!inner) continue;
      check_rope_type(*inner);
      places.push_back(*inner);
    }
    places.push_back(*section);
  }
  bool has_theta = false, has_factor = false;
  for (const Section& place : places) {
    if (const auto theta = place.maybe_number("rope_theta"); theta && !has_theta) {
      if (!std::isfinite(*theta) || *theta <= 1 || *theta > 1e12)
        fail(Fault::model, "{}: expected a number above 1, found {}", place.name("rope_theta"), *theta);
      dims.rope_theta = *theta;
      has_theta = true;
    }
    if (place.find("partial_rotary_factor") && !has_factor) {
      place.expect("partial_rotary_factor", static_cast<double>(kRotaryDim) / kHeadDim);
      has_factor = true;
    }
  }
  if (!has_theta) fail(Fault::model, "{} is missing", text.name("rope_parameters.rope_theta"));
}

void check_multiple(const Section& text, const char* key, int value, int of, const char* why) {
  if (value % of != 0)
    fail(Fault::model, "{}: expected a multiple of {} ({}), found {}", text.name(key), of, why, value);
}

Dims read_dims(const Section& root, const Section& text) {
  Dims dims;
  dims.hidden = text.dim("hidden_size");
  dims.n_layers = text.dim("num_hidden_layers", 1024);
  dims.vocab = text.dim("vocab_size");
  dims.n_q_heads = text.dim("num_attention_heads");
  dims.n_kv_heads = text.dim("num_key_value_heads");
  dims.n_key_heads = text.dim("linear_num_key_heads");
  dims.n_value_heads = text.dim("linear_num_value_heads");
  dims.n_experts = text.dim("num_experts", 4096);
  dims.expert_width = text.dim("moe_intermediate_size");
  dims.shared_width = text.dim("shared_expert_intermediate_size");
  dims.max_positions = text.dim("max_position_embeddings");
  read_rope(root, text, dims);

  if (dims.n_experts < kExpertsPerToken)
    fail(Fault::model, "{}: expected {} or more, found {}", text.name("num_experts"), kExpertsPerToken,
         dims.n_experts);
  check_multiple(text, "num_attention_heads", dims.n_q_heads, dims.n_kv_heads, "num_key_value_heads");
  if (dims.n_value_heads != kValueHeadsPerKey * dims.n_key_heads)
    fail(Fault::model, "{}: expected {} ({} for each key head), found {}",
         text.name("linear_num_value_heads"), kValueHeadsPerKey * dims.n_key_heads, kValueHeadsPerKey,
         dims.n_value_heads);
  const char* group = "the quantisation group";
  check_multiple(text, "hidden_size", dims.hidden, kQuantGroup, group);
  check_multiple(text, "moe_intermediate_size", dims.expert_width, kQuantGroup, group);
  check_multiple(text, "shared_expert_intermediate_size", dims.shared_width, kQuantGroup, group);
  return dims;
}

void add_stop_ids(const Section& section, int vocab, std::set<int32_t>& ids) {
  const Json* value = section.find("eos_token_id");
  if (!value) return;
  const Json list = value->is_array() ? *value : Json::array({*value});
  for (const Json& id : list) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= static_cast<uint64_t>(vocab))
      fail(Fault::model, "{}: expected token ids from 0 to {}, found {}", section.name("eos_token_id"),
           vocab - 1, shown(id));
    ids.insert(id.get<int32_t>());
  }
}

SamplingDefaults read_sampling(const Section& generation) {
  SamplingDefaults sampling;
  sampling.do_sample = generation.maybe_flag("do_sample").value_or(sampling.do_sample);
  const auto number = [&](const char* key, double& value, double max) {
    const auto found = generation.maybe_number(key);
    if (!found) return;
    if (!(*found >= 0 && *found <= max))
      fail(Fault::model, "{}: expected a number from 0 to {}, found {}", generation.name(key), max, *found);
    value = *found;
  };
  number("temperature", sampling.temperature, 100);
  number("top_p", sampling.top_p, 1);
  sampling.top_k = static_cast<int>(generation.maybe_integer("top_k", 0, INT32_MAX).value_or(sampling.top_k));
  return sampling;
}

Json parse_object(std::string_view text, const char* file) {
  Json document = parse_json_strict(text, file, kMaxConfigBytes);
  if (!document.is_object()) fail(Fault::model, "{}: is not a JSON object", file);
  return document;
}

}  // namespace

Config parse_config(std::string_view config_text, std::string_view generation_text) {
  const Json document = parse_object(config_text, "config.json");
  const Section root(document, "config.json", "");
  const Section text = root.object("text_config").value_or(root);  // a text-only conversion is flat

  check_architecture(root, text);
  check_constants(text);
  Config config;
  config.dims = read_dims(root, text);
  check_layer_types(text, config.dims);
  config.quantisation = parse_quantisation(document);
  const auto text_tied = text.maybe_flag("tie_word_embeddings"),
             root_tied = root.maybe_flag("tie_word_embeddings");
  config.tied_embeddings = text_tied ? *text_tied : root_tied.value_or(false);

  std::set<int32_t> stop_ids;
  add_stop_ids(root, config.dims.vocab, stop_ids);
  add_stop_ids(text, config.dims.vocab, stop_ids);
  if (config.dims.vocab > kImEnd) stop_ids.insert({kImEnd, kEndOfText});
  if (!generation_text.empty()) {
    const Json generation_document = parse_object(generation_text, "generation_config.json");
    const Section generation(generation_document, "generation_config.json", "");
    add_stop_ids(generation, config.dims.vocab, stop_ids);
    config.sampling = read_sampling(generation);
  }
  config.stop_ids.assign(stop_ids.begin(), stop_ids.end());
  return config;
}

Config read_config(const std::filesystem::path& folder, std::string* raw) {
  const std::filesystem::path config_path = folder / "config.json",
                              generation_path = folder / "generation_config.json";
  std::error_code ignored;
  if (!std::filesystem::exists(config_path, ignored))
    fail(Fault::model, "{}: has no config.json; is this a checkpoint folder?",
         printable(folder.string(), 400));
  const std::string text = read_text_file(config_path, kMaxConfigBytes);
  std::string generation_text;
  if (std::filesystem::exists(generation_path, ignored)) {
    generation_text = read_text_file(generation_path, kMaxConfigBytes);
    // A file of no bytes is not the same as no file.
    if (generation_text.empty())
      fail(Fault::model, "generation_config.json: is empty; delete it or download it again");
  }
  Config config = parse_config(text, generation_text);
  if (raw) *raw = text;
  return config;
}

}  // namespace lily::model
