// The tensor catalogue: every weight the model has, by name, shape and allowed storage. The loader needs no
// special cases beyond it, and plans, packing and backends speak of weights only as WeightId.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "model/dims.h"

namespace lily::model {

enum class Weight : uint8_t {
  embed,        // model.embed_tokens            [vocab, hidden]
  lm_head,      // lm_head                       [vocab, hidden]
  final_norm,   // model.norm.weight             [hidden]
  input_norm,   // L.input_layernorm.weight      [hidden]
  post_norm,    // L.post_attention_layernorm.weight [hidden]
  q_proj,       // L.self_attn.q_proj            [q_gate_width, hidden], per head 256 query then 256 gate rows
  k_proj,       // L.self_attn.k_proj            [kv_width, hidden]
  v_proj,       // L.self_attn.v_proj            [kv_width, hidden]
  o_proj,       // L.self_attn.o_proj            [hidden, q_width]
  q_norm,       // L.self_attn.q_norm.weight     [256]
  k_norm,       // L.self_attn.k_norm.weight     [256]
  delta_qkv,    // L.linear_attn.in_proj_qkv     [conv_channels, hidden]
  delta_z,      // L.linear_attn.in_proj_z       [value_width, hidden]
  delta_b,      // L.linear_attn.in_proj_b       [n_value_heads, hidden]
  delta_a,      // L.linear_attn.in_proj_a       [n_value_heads, hidden]
  delta_out,    // L.linear_attn.out_proj        [hidden, value_width]
  conv,         // L.linear_attn.conv1d.weight   [conv_channels, 4] (file: [conv_channels, 4, 1])
  a_log,        // L.linear_attn.A_log           [n_value_heads]
  dt_bias,      // L.linear_attn.dt_bias         [n_value_heads]
  delta_norm,   // L.linear_attn.norm.weight     [128], stored without the +1 that other norms include
  router,       // L.mlp.gate                    [n_experts, hidden]
  shared_gate,  // L.mlp.shared_expert_gate      [1, hidden]: the scalar gate of the shared expert
  expert_gate,  // L.mlp.switch_mlp.gate_proj    [n_experts, expert_width, hidden]
  expert_up,    // L.mlp.switch_mlp.up_proj      [n_experts, expert_width, hidden]
  expert_down,  // L.mlp.switch_mlp.down_proj    [n_experts, hidden, expert_width]
  shared_gate_proj,  // L.mlp.shared_expert.gate_proj [shared_width, hidden]
  shared_up_proj,    // L.mlp.shared_expert.up_proj   [shared_width, hidden]
  shared_down_proj,  // L.mlp.shared_expert.down_proj [hidden, shared_width]
};
inline constexpr int kWeightKinds = static_cast<int>(Weight::shared_down_proj) + 1;

inline constexpr int kNoLayer = -1;  // embed, lm_head, final_norm

struct WeightId {
  Weight weight = Weight::embed;
  int layer = kNoLayer;
  bool operator==(const WeightId&) const = default;
};

// A small number of its own for every id, for tables.
inline size_t weight_index(WeightId id) {
  return static_cast<size_t>(id.layer + 1) * kWeightKinds + static_cast<size_t>(id.weight);
}

// How the elements of a linear weight are stored in the file.
enum class Storage : uint8_t {
  q4,    // 4-bit codes, group 64, scale and bias: w = scale * code + bias
  q8,    // 8-bit codes, otherwise the same
  bf16,  // unquantised (F16 and F32 files are converted)
  f32,   // only A_log, dt_bias and norms, all widened to fp32 while loading
};

struct WeightSpec {
  WeightId id;
  std::string name;            // without the `language_model.` prefix and without `.weight`
  std::vector<int64_t> shape;  // logical; the last dimension is the input one for linear weights
  bool quantisable = false;    // linear weights, embedding and head
  int64_t n_elements() const;
};

// All weights of a model with these dimensions, in execution order: embedding, layers, final norm, head.
std::vector<WeightSpec> catalogue(const Dims& dims);

// The spec of one weight; the layer must be one that has it.
WeightSpec weight_spec(const Dims& dims, WeightId id);

// Bytes of a linear weight stored so, scales and biases (bf16) included.
int64_t storage_bytes(int64_t n_elements, Storage storage);

// What the published 4-bit checkpoint stores: q8 for the two gates, q4 for other linear weights, bf16 for the
// rest of the file. Used where no checkpoint is at hand (`lily plan --shape`).
Storage published_storage(Weight weight);

std::string to_string(WeightId id);  // "layers.3.router", "lm_head": the names of `lily plan` and `lily diff`

}  // namespace lily::model
