// What outlives a step in GPU memory, besides the weights: state slots, KV blocks, token slots.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/metal/device.h"
#include "model/dims.h"

namespace lily::metal {

class Memory {
 public:
  Memory(Device& gpu, const model::Dims& dims, const backend::MemorySpec& spec);

  // One buffer a layer: all slots or blocks. Layouts: kernels/delta.h, kernels/attention.h.
  Buffer& delta_state(int layer) const { return *delta_[index(layer)]; }
  Buffer& conv_state(int layer) const { return *conv_[index(layer)]; }
  Buffer& k_cache(int layer) const { return *k_[index(layer)]; }
  Buffer& v_cache(int layer) const { return *v_[index(layer)]; }
  Buffer& token_slots() const { return *token_slots_; }
  const backend::MemorySpec& spec() const { return spec_; }

  size_t delta_slot_bytes() const;
  size_t conv_slot_bytes() const;
  size_t block_bytes() const;  // of K or V in a layer
  static size_t total_bytes(const model::Dims& dims, const backend::MemorySpec& spec);

  // Canonical fp32 layouts, as in backend.h. No command buffer may be in flight.
  std::vector<float> read_delta(int slot, int layer) const;  // [value head][dk][dv]
  void write_delta(int slot, int layer, std::span<const float> data);
  std::vector<float> read_conv(int slot, int layer) const;  // [3][channels]
  void write_conv(int slot, int layer, std::span<const float> data);
  std::vector<float> read_kv(bool is_k, int layer, int block,
                             int n_tokens) const;  // [n_tokens][kv head][256]
  void write_kv(bool is_k, int layer, int block, int n_tokens, std::span<const float> data);

 private:
  size_t index(int layer) const { return static_cast<size_t>(dims_.mixer_index(layer)); }
  // Where a channel of value head h stands among all channels.
  int64_t channel(int head, int c) const;

  model::Dims dims_;
  backend::MemorySpec spec_;
  std::vector<std::unique_ptr<Buffer>> delta_, conv_, k_, v_;
  std::unique_ptr<Buffer> token_slots_;
};

}  // namespace lily::metal
