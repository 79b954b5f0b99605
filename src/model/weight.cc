#include "model/weight.h"

#include <fmt/format.h>

#include "base/error.h"

namespace lily::model {
namespace {

struct Entry {
  const char* file_name;   // after `model.layers.{l}.`, or the whole name outside layers
  const char* short_name;  // after `layers.{l}.`
};

constexpr std::array<Entry, kWeightKinds> kEntries = {{
    {"model.embed_tokens", "embed"},
    {"lm_head", "lm_head"},
    {"model.norm", "final_norm"},
    {"input_layernorm", "input_norm"},
    {"post_attention_layernorm", "post_norm"},
    {"self_attn.q_proj", "q_proj"},
    {"self_attn.k_proj", "k_proj"},
    {"self_attn.v_proj", "v_proj"},
    {"self_attn.o_proj", "o_proj"},
    {"self_attn.q_norm", "q_norm"},
    {"self_attn.k_norm", "k_norm"},
    {"linear_attn.in_proj_qkv", "delta_qkv"},
    {"linear_attn.in_proj_z", "delta_z"},
    {"linear_attn.in_proj_b", "delta_b"},
    {"linear_attn.in_proj_a", "delta_a"},
    {"linear_attn.out_proj", "delta_out"},
    {"linear_attn.conv1d", "conv"},
    {"linear_attn.A_log", "a_log"},
    {"linear_attn.dt_bias", "dt_bias"},
    {"linear_attn.norm", "delta_norm"},
    {"mlp.gate", "router"},
    {"mlp.shared_expert_gate", "shared_gate"},
    {"mlp.switch_mlp.gate_proj", "expert_gate"},
    {"mlp.switch_mlp.up_proj", "expert_up"},
    {"mlp.switch_mlp.down_proj", "expert_down"},
    {"mlp.shared_expert.gate_proj", "shared_gate_proj"},
    {"mlp.shared_expert.up_proj", "shared_up_proj"},
    {"mlp.shared_expert.down_proj", "shared_down_proj"},
}};

std::vector<int64_t> shape_of(const Dims& d, Weight weight) {
  switch (weight) {
    case Weight::embed:
    case Weight::lm_head:
      return {d.vocab, d.hidden};
    case Weight::final_norm:
    case Weight::input_norm:
    case Weight::post_norm:
      return {d.hidden};
    case Weight::q_proj:
      return {d.q_gate_width(), d.hidden};
    case Weight::k_proj:
    case Weight::v_proj:
      return {d.kv_width(), d.hidden};
    case Weight::o_proj:
      return {d.hidden, d.q_width()};
    case Weight::q_norm:
    case Weight::k_norm:
      return {kHeadDim};
    case Weight::delta_qkv:
      return {d.conv_channels(), d.hidden};
    case Weight::delta_z:
      return {d.value_width(), d.hidden};
    case Weight::delta_b:
    case Weight::delta_a:
      return {d.n_value_heads, d.hidden};
    case Weight::delta_out:
      return {d.hidden, d.value_width()};
    case Weight::conv:
      return {d.conv_channels(), kConvTaps};
    case Weight::a_log:
    case Weight::dt_bias:
      return {d.n_value_heads};
    case Weight::delta_norm:
      return {kDeltaHeadDim};
    case Weight::router:
      return {d.n_experts, d.hidden};
    case Weight::shared_gate:
      return {1, d.hidden};
    case Weight::expert_gate:
    case Weight::expert_up:
      return {d.n_experts, d.expert_width, d.hidden};
    case Weight::expert_down:
      return {d.n_experts, d.hidden, d.expert_width};
    case Weight::shared_gate_proj:
    case Weight::shared_up_proj:
      return {d.shared_width, d.hidden};
    case Weight::shared_down_proj:
      return {d.hidden, d.shared_width};
  }
  LILY_CHECK(false, "weight {}", static_cast<int>(weight));
  return {};
}

bool is_quantisable(Weight weight) {
  switch (weight) {
    case Weight::final_norm:
    case Weight::input_norm:
    case Weight::post_norm:
    case Weight::q_norm:
    case Weight::k_norm:
    case Weight::conv:
    case Weight::a_log:
    case Weight::dt_bias:
    case Weight::delta_norm:
      return false;
    default:
      return true;
  }
}

const Entry& entry(Weight weight) { return kEntries[static_cast<size_t>(weight)]; }

constexpr std::array kAttentionWeights = {Weight::q_proj, Weight::k_proj, Weight::v_proj,
                                          Weight::q_norm, Weight::k_norm, Weight::o_proj};
constexpr std::array kDeltaWeights = {Weight::delta_qkv, Weight::delta_z,    Weight::delta_b,
                                      Weight::delta_a,   Weight::conv,       Weight::a_log,
                                      Weight::dt_bias,   Weight::delta_norm, Weight::delta_out};
constexpr std::array kMoeWeights = {
    Weight::post_norm,        Weight::router,         Weight::shared_gate,
    Weight::expert_gate,      Weight::expert_up,      Weight::expert_down,
    Weight::shared_gate_proj, Weight::shared_up_proj, Weight::shared_down_proj};

}  // namespace

int64_t WeightSpec::n_elements() const {
  int64_t n = 1;
  for (const int64_t size : shape) n *= size;
  return n;
}

WeightSpec weight_spec(const Dims& dims, WeightId id) {
  std::string name = entry(id.weight).file_name;
  if (id.layer != kNoLayer) name = fmt::format("model.layers.{}.{}", id.layer, name);
  return {id, std::move(name), shape_of(dims, id.weight), is_quantisable(id.weight)};
}

std::vector<WeightSpec> catalogue(const Dims& dims) {
  std::vector<WeightSpec> specs;
  const auto add = [&](Weight weight, int layer) { specs.push_back(weight_spec(dims, {weight, layer})); };
  add(Weight::embed, kNoLayer);
  for (int layer = 0; layer < dims.n_layers; ++layer) {
    add(Weight::input_norm, layer);
    if (dims.mixer(layer) == Mixer::attention)
      for (const Weight weight : kAttentionWeights) add(weight, layer);
    else
      for (const Weight weight : kDeltaWeights) add(weight, layer);
    for (const Weight weight : kMoeWeights) add(weight, layer);
  }
  add(Weight::final_norm, kNoLayer);
  add(Weight::lm_head, kNoLayer);
  return specs;
}

int64_t storage_bytes(int64_t n_elements, Storage storage) {
  switch (storage) {
    case Storage::q4:
      return n_elements / 2 + n_elements / kQuantGroup * 4;
    case Storage::q8:
      return n_elements + n_elements / kQuantGroup * 4;
    case Storage::bf16:
      return n_elements * 2;
    case Storage::f32:
      return n_elements * 4;
  }
  LILY_CHECK(false, "storage {}", static_cast<int>(storage));
  return 0;
}

Storage published_storage(Weight weight) {
  if (weight == Weight::router || weight == Weight::shared_gate) return Storage::q8;
  return is_quantisable(weight) ? Storage::q4 : Storage::bf16;
}

std::string to_string(WeightId id) {
  if (id.layer == kNoLayer) return entry(id.weight).short_name;
  return fmt::format("layers.{}.{}", id.layer, entry(id.weight).short_name);
}

}  // namespace lily::model
