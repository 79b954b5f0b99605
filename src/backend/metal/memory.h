// What outlives a step in GPU memory, besides the weights: state slots, KV blocks, token slots.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/metal/device.h"
#include "model/dims.h"

namespace lily::metal {

// One layer's part of all slots or blocks: it begins at `offset` in the first one.
struct MemoryPart {
  Buffer* buffer = nullptr;
  size_t offset = 0, length = 0;
  size_t stride = 0;  // from slot to slot or block to block
  size_t count = 0;   // of them
  size_t at(int i) const { return offset + static_cast<size_t>(i) * stride; }
};

// Where things lie in a slot and in a block. A slot has the delta state of each delta layer and then the conv
// state of each, a block K and then V of each attention layer; layouts within a layer: kernels/delta.h,
// kernels/attention.h. All begin at multiples of 256 bytes.
class MemoryLayout {
 public:
  MemoryLayout(const model::Dims& dims, plan::KvType kv_type) : dims_(dims), kv_type_(kv_type) {}

  size_t delta_bytes() const { return static_cast<size_t>(dims_.delta_state_bytes_per_layer()); }
  size_t conv_bytes() const;
  size_t state_bytes() const;    // of all layers
  size_t kv_bytes() const;       // of K or V in a block and a layer
  size_t block_bytes() const;    // of all layers
  int blocks_per_state() const;  // 0: blocks hold nothing
  // From slot to slot; with shared places a multiple of a block.
  size_t slot_stride(bool shared_places) const;
  size_t states_bytes(const backend::MemorySpec& spec) const;  // of their own
  size_t blocks_bytes(const backend::MemorySpec& spec) const;  // with shared places of all places
  size_t total_bytes(const backend::MemorySpec& spec) const;
  size_t largest_buffer(const backend::MemorySpec& spec) const;

  size_t delta_offset(int layer) const { return index(layer) * delta_bytes(); }
  size_t conv_offset(int layer) const;
  size_t k_offset(int layer) const { return 2 * index(layer) * kv_bytes(); }
  size_t v_offset(int layer) const { return (2 * index(layer) + 1) * kv_bytes(); }

 private:
  size_t index(int layer) const { return static_cast<size_t>(dims_.mixer_index(layer)); }

  model::Dims dims_;
  plan::KvType kv_type_;
};

class Memory {
 public:
  Memory(Device& gpu, const model::Dims& dims, const backend::MemorySpec& spec, plan::KvType kv_type);

  MemoryPart delta_state(int layer) const {
    return slots(layout_.delta_offset(layer), layout_.delta_bytes());
  }
  MemoryPart conv_state(int layer) const { return slots(layout_.conv_offset(layer), layout_.conv_bytes()); }
  MemoryPart k_cache(int layer) const { return blocks(layout_.k_offset(layer)); }
  MemoryPart v_cache(int layer) const { return blocks(layout_.v_offset(layer)); }
  MemoryPart states() const { return slots(0, layout_.state_bytes()); }  // of all layers
  Buffer& token_slots() const { return *token_slots_; }
  const backend::MemorySpec& spec() const { return spec_; }
  plan::KvType kv_type() const { return kv_type_; }
  size_t slot_stride() const { return layout_.slot_stride(spec_.shared_places); }
  size_t block_stride() const { return layout_.block_bytes(); }

  // Canonical fp32 layouts, as in backend.h. No command buffer may be in flight.
  std::vector<float> read_delta(int slot, int layer) const;  // [value head][dk][dv]
  void write_delta(int slot, int layer, std::span<const float> data);
  std::vector<float> read_conv(int slot, int layer) const;  // [3][channels]
  void write_conv(int slot, int layer, std::span<const float> data);
  std::vector<float> read_kv(bool is_k, int layer, int block,
                             int n_tokens) const;  // [n_tokens][kv head][256]
  void write_kv(bool is_k, int layer, int block, int n_tokens, std::span<const float> data);

 private:
  MemoryPart slots(size_t offset, size_t length) const;
  MemoryPart blocks(size_t offset) const;
  std::vector<float> read_rows(const MemoryPart& part, size_t plane, int n_tokens) const;
  void write_rows(const MemoryPart& part, size_t plane, std::span<const float> rows);
  // Where a channel of value head h stands among all channels.
  int64_t channel(int head, int c) const;

  model::Dims dims_;
  backend::MemorySpec spec_;
  plan::KvType kv_type_;
  MemoryLayout layout_;
  std::unique_ptr<Buffer> states_;  // none with shared places
  std::unique_ptr<Buffer> blocks_;
  std::unique_ptr<Buffer> token_slots_;
};

}  // namespace lily::metal
