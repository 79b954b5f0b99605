// The model's dimensions and layer pattern (docs/formats.md, "Dimensions").
#pragma once

#include <cstdint>

namespace lily::model {

// What kernels may specialise on. A checkpoint that differs is refused while loading, naming key and value.
inline constexpr int kHeadDim = 256;       // full attention
inline constexpr int kRotaryDim = 64;      // leading dims of a head that rotate, as pairs (i, i + 32)
inline constexpr int kDeltaHeadDim = 128;  // Gated DeltaNet, key and value heads
inline constexpr int kConvTaps = 4;        // tap 3 is the current token
inline constexpr int kExpertsPerToken = 8;
inline constexpr int kQuantGroup = 64;        // weights that share a scale and a bias
inline constexpr int kValueHeadsPerKey = 2;   // Gated DeltaNet: value head h uses key head h / 2
inline constexpr float kNormEpsilon = 1e-6f;  // every RMSNorm, and inside the sum of the q/k L2 norm

enum class Mixer { delta, attention };

// Names in comments are config.json's, under text_config.
struct Dims {
  int hidden = 0;              // hidden_size
  int n_layers = 0;            // num_hidden_layers
  int attention_interval = 4;  // full_attention_interval: layer l is attention iff (l + 1) % interval == 0
  int vocab = 0;               // vocab_size: rows of embedding and head, padding rows included
  int n_q_heads = 0;           // num_attention_heads
  int n_kv_heads = 0;          // num_key_value_heads
  int n_key_heads = 0;         // linear_num_key_heads
  int n_value_heads = 0;       // linear_num_value_heads
  int n_experts = 0;           // num_experts
  int expert_width = 0;        // moe_intermediate_size
  int shared_width = 0;        // shared_expert_intermediate_size
  double rope_theta = 0;       // rope_parameters.rope_theta
  int max_positions = 0;       // max_position_embeddings

  Mixer mixer(int layer) const {
    return (layer + 1) % attention_interval == 0 ? Mixer::attention : Mixer::delta;
  }
  int n_attention_layers() const { return n_layers / attention_interval; }
  int n_delta_layers() const { return n_layers - n_attention_layers(); }
  // Position of a layer among those of its own kind; indexes KV caches and recurrent states.
  int mixer_index(int layer) const {
    return mixer(layer) == Mixer::attention ? layer / attention_interval : layer - layer / attention_interval;
  }

  int q_width() const { return n_q_heads * kHeadDim; }    // attention output before o_proj
  int q_gate_width() const { return 2 * q_width(); }      // q_proj rows: per head 256 query, then 256 gate
  int kv_width() const { return n_kv_heads * kHeadDim; }  // k_proj rows, v_proj rows
  int key_width() const { return n_key_heads * kDeltaHeadDim; }
  int value_width() const { return n_value_heads * kDeltaHeadDim; }
  int conv_channels() const { return 2 * key_width() + value_width(); }  // q heads, k heads, v heads

  // Bytes a sequence needs in every delta layer: fp32 state [value head][dk][dv], whatever the length.
  int64_t delta_state_bytes_per_layer() const {
    return int64_t{n_value_heads} * kDeltaHeadDim * kDeltaHeadDim * 4;
  }

  bool operator==(const Dims&) const = default;
};

Dims qwen36_35b_a3b();  // the real model
Dims lily_tiny();       // the bundled model

}  // namespace lily::model
