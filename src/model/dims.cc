#include "model/dims.h"

namespace lily::model {

Dims qwen36_35b_a3b() {
  return {.hidden = 2048,
          .n_layers = 40,
          .attention_interval = 4,
          .vocab = 248320,
          .n_q_heads = 16,
          .n_kv_heads = 2,
          .n_key_heads = 16,
          .n_value_heads = 32,
          .n_experts = 256,
          .expert_width = 512,
          .shared_width = 512,
          .rope_theta = 1e7,
          .max_positions = 262144};
}

Dims lily_tiny() {
  return {.hidden = 256,
          .n_layers = 8,
          .attention_interval = 4,
          .vocab = 8192,
          .n_q_heads = 8,
          .n_kv_heads = 1,
          .n_key_heads = 2,
          .n_value_heads = 4,
          .n_experts = 32,
          .expert_width = 128,
          .shared_width = 128,
          .rope_theta = 1e7,
          .max_positions = 262144};
}

}  // namespace lily::model
