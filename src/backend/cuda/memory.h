// What sequences own on the device: state slots, KV blocks, token slots.
#pragma once

#include <cstdint>

#include "backend/backend.h"
#include "backend/cuda/buffer.h"
#include "backend/cuda/kernels/kv_layout.h"
#include "model/dims.h"

namespace lily::cuda {

class Memory {
 public:
  Memory(const model::Dims& dims, const backend::MemorySpec& spec);

  const backend::MemorySpec& spec() const { return spec_; }
  // A slot is contiguous over the layers, so that copying it is one copy.
  float* delta_state(int layer) const;  // of slot 0: [value head][dv][dk]
  int64_t delta_slot_stride() const { return delta_floats_ * dims_.n_delta_layers(); }
  uint16_t* conv_state(int layer) const;  // of slot 0: [3][channels]
  int64_t conv_slot_stride() const { return conv_values_ * dims_.n_delta_layers(); }
  int64_t delta_floats() const { return delta_floats_; }  // of a layer
  int64_t conv_values() const { return conv_values_; }
  KvCache kv(int layer) const;
  int32_t* token_slots() const { return tokens_.get<int32_t>(); }
  void copy_state(int src, int dst, cudaStream_t stream) const;

 private:
  model::Dims dims_;
  backend::MemorySpec spec_;
  int64_t delta_floats_, conv_values_, kv_values_;  // of a layer
  DeviceMemory delta_, conv_, kv_, tokens_;
};

}  // namespace lily::cuda
