#include "backend/cuda/memory.h"

namespace lily::cuda {

Memory::Memory(const model::Dims& dims, const backend::MemorySpec& spec)
    : dims_(dims),
      spec_(spec),
      delta_floats_(dims.delta_state_bytes_per_layer() / 4),
      conv_values_(int64_t{model::kConvTaps - 1} * dims.conv_channels()),
      kv_values_(int64_t{spec.n_kv_blocks} * kKvBlock * dims.kv_width()),
      delta_(static_cast<size_t>(spec.n_state_slots * delta_slot_stride()) * 4),
      conv_(static_cast<size_t>(spec.n_state_slots * conv_slot_stride()) * 2),
      kv_(static_cast<size_t>(2 * kv_values_ * dims.n_attention_layers()) * 2),
      tokens_(static_cast<size_t>(spec.n_token_slots) * 4) {
  // NaN and wild ids until written: what is read too early shows.
  for (const DeviceMemory* m : {&delta_, &conv_, &kv_, &tokens_})
    if (m->n_bytes() > 0) check(cudaMemset(m->get(), 0xff, m->n_bytes()), "clearing state memory");
  check(cudaDeviceSynchronize(), "clearing state memory");
}

float* Memory::delta_state(int layer) const {
  return delta_.get<float>() + dims_.mixer_index(layer) * delta_floats_;
}
uint16_t* Memory::conv_state(int layer) const {
  return conv_.get<uint16_t>() + dims_.mixer_index(layer) * conv_values_;
}

KvCache Memory::kv(int layer) const {
  uint16_t* k = kv_.get<uint16_t>() + 2 * kv_values_ * dims_.mixer_index(layer);
  return {k, k + kv_values_, dims_.n_kv_heads};
}

void Memory::copy_state(int src, int dst, cudaStream_t stream) const {
  const auto copy = [&](const DeviceMemory& m, int64_t slot_bytes) {
    check(cudaMemcpyAsync(m.get(static_cast<size_t>(dst * slot_bytes)),
                          m.get(static_cast<size_t>(src * slot_bytes)), static_cast<size_t>(slot_bytes),
                          cudaMemcpyDeviceToDevice, stream),
          "copying a state");
  };
  copy(delta_, delta_slot_stride() * 4);
  copy(conv_, conv_slot_stride() * 2);
}

}  // namespace lily::cuda
