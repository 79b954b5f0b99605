// What sequences own on the device: state slots, KV blocks, token slots. States and blocks are the places of
// one allocation:
//   state: delta of all layers, [layer][value head][dv][dk] fp32, then conv of all layers,
//          [layer][3][channels] bf16
//   block: kernels/kv_layout.h
// Blocks lie behind the states, or (MemorySpec::shared_places) slot s lies where block s * blocks_per_state
// does. All sizes are multiples of 128 bytes.
#pragma once

#include <cstdint>

#include "backend/backend.h"
#include "backend/cuda/buffer.h"
#include "backend/cuda/kernels/kv_layout.h"
#include "model/dims.h"

namespace lily::cuda {

KvForm kv_form(plan::KvType type);                             // bf16 or int8: device.cc refuses others
int64_t state_bytes(const model::Dims& dims);                  // of a slot
int64_t kv_block_bytes(const model::Dims& dims, KvForm form);  // of a block, all layers
backend::SharedPlaces shared_places(const model::Dims& dims, KvForm form);

class Memory {
 public:
  Memory(const model::Dims& dims, const backend::MemorySpec& spec, KvForm form);

  const backend::MemorySpec& spec() const { return spec_; }
  float* delta_state(int layer) const;  // of slot 0: [value head][dv][dk]
  int64_t delta_slot_stride() const { return slot_stride_ / 4; }
  uint16_t* conv_state(int layer) const;  // of slot 0: [3][channels]
  int64_t conv_slot_stride() const { return slot_stride_ / 2; }
  int64_t delta_floats() const { return delta_floats_; }  // of a layer
  int64_t conv_values() const { return conv_values_; }
  KvForm form() const { return form_; }
  KvCache kv(int layer) const;
  int32_t* token_slots() const { return tokens_.get<int32_t>(); }
  void copy_state(int src, int dst, cudaStream_t stream) const;

 private:
  model::Dims dims_;
  backend::MemorySpec spec_;
  KvForm form_;
  int64_t delta_floats_, conv_values_;         // of a layer
  int64_t slot_stride_, block_bytes_, kv_at_;  // kv_at_: of block 0 in places_
  DeviceMemory places_, tokens_;
};

}  // namespace lily::cuda
