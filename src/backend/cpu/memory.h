// What outlives a step: recurrent and convolution states in slots, KV blocks, token slots. Slots and blocks
// are plain memory; who may use which is the engine's business.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/kernels/kv_block.h"
#include "base/page_block.h"

namespace lily::backend::cpu {

class Memory {
 public:
  Memory(const model::Dims& dims, const backend::MemorySpec& spec, plan::KvType kv_type);

  // Of a layer's own kind (Dims::mixer).
  float* delta_state(backend::StateSlot slot, int layer) const;  // [value head][128][128]
  float* conv_state(backend::StateSlot slot, int layer) const;   // [3][conv_channels], oldest first
  KvLayer kv(int layer) const;
  int32_t& token(backend::TokenSlot slot);
  void copy_state(backend::StateSlot src, backend::StateSlot dst);

  // What they hold is lost; their memory goes back to the system.
  void give_back_state(backend::StateSlot slot);
  void give_back_kv(int32_t block);

  const backend::MemorySpec& spec() const { return spec_; }
  plan::KvType kv_type() const { return kv_type_; }
  int64_t delta_floats() const;  // of a layer
  int64_t conv_floats() const;   // of a layer

 private:
  int64_t slot_floats() const { return dims_.n_delta_layers() * (delta_floats() + conv_floats()); }
  int64_t kv_block_bytes() const;  // of all layers
  float* slot(backend::StateSlot slot) const;

  model::Dims dims_;
  backend::MemorySpec spec_;
  plan::KvType kv_type_;
  PageBlock states_;  // [slot][delta layer]{delta state, conv state}
  PageBlock kv_;      // [block][attention layer]
  std::vector<int32_t> tokens_;
};

}  // namespace lily::backend::cpu
