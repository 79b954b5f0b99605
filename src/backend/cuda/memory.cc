#include "backend/cuda/memory.h"

#include "base/error.h"

namespace lily::cuda {
namespace {

int64_t delta_floats_of(const model::Dims& dims) { return dims.delta_state_bytes_per_layer() / 4; }
int64_t conv_values_of(const model::Dims& dims) {
  return int64_t{model::kConvTaps - 1} * dims.conv_channels();
}
int64_t kv_part_bytes(const model::Dims& dims, KvForm form) {
  return int64_t{dims.n_kv_heads} * kv_head_bytes(form);
}

}  // namespace

KvForm kv_form(plan::KvType type) { return type == plan::KvType::int8 ? KvForm::int8 : KvForm::bf16; }

int64_t state_bytes(const model::Dims& dims) {
  return dims.n_delta_layers() * (delta_floats_of(dims) * 4 + conv_values_of(dims) * 2);
}

int64_t kv_block_bytes(const model::Dims& dims, KvForm form) {
  return dims.n_attention_layers() * 2 * kv_part_bytes(dims, form);
}

backend::SharedPlaces shared_places(const model::Dims& dims, KvForm form) {
  const int64_t block = kv_block_bytes(dims, form);
  if (block == 0) return {};  // a model cut down to its first layers has no attention
  return {.blocks_per_state = static_cast<int>((state_bytes(dims) + block - 1) / block)};
}

Memory::Memory(const model::Dims& dims, const backend::MemorySpec& spec, KvForm form)
    : dims_(dims),
      spec_(spec),
      form_(form),
      delta_floats_(delta_floats_of(dims)),
      conv_values_(conv_values_of(dims)),
      slot_stride_(state_bytes(dims)),
      block_bytes_(kv_block_bytes(dims, form)),
      kv_at_(0),
      tokens_(static_cast<size_t>(spec.n_token_slots) * 4) {
  if (spec.shared_places) {
    const int n = shared_places(dims, form).blocks_per_state;
    LILY_CHECK(spec.n_kv_blocks == spec.n_state_slots * n, "{} blocks where {} states of {} blocks lie",
               spec.n_kv_blocks, spec.n_state_slots, n);
    slot_stride_ = n * block_bytes_;
  } else {
    kv_at_ = spec.n_state_slots * slot_stride_;
  }
  places_ = DeviceMemory(static_cast<size_t>(kv_at_ + spec.n_kv_blocks * block_bytes_));
  // NaN and wild ids until written: what is read too early shows.
  for (const DeviceMemory* m : {&places_, &tokens_})
    if (m->n_bytes() > 0) check(cudaMemset(m->get(), 0xff, m->n_bytes()), "clearing state memory");
  check(cudaDeviceSynchronize(), "clearing state memory");
}

float* Memory::delta_state(int layer) const {
  return places_.get<float>() + dims_.mixer_index(layer) * delta_floats_;
}
uint16_t* Memory::conv_state(int layer) const {
  return places_.get<uint16_t>() + dims_.n_delta_layers() * delta_floats_ * 2 +
         dims_.mixer_index(layer) * conv_values_;
}

KvCache Memory::kv(int layer) const {
  const int64_t part = kv_part_bytes(dims_, form_);
  auto* k = places_.get<unsigned char>(static_cast<size_t>(kv_at_ + dims_.mixer_index(layer) * 2 * part));
  return {k, k + part, dims_.n_kv_heads, static_cast<uint32_t>(block_bytes_), form_};
}

void Memory::copy_state(int src, int dst, cudaStream_t stream) const {
  const auto at = [&](int slot) { return places_.get(static_cast<size_t>(slot * slot_stride_)); };
  if (src < 0) {  // kNoState: zeros
    check(cudaMemsetAsync(at(dst), 0, static_cast<size_t>(state_bytes(dims_)), stream), "clearing a state");
    return;
  }
  check(cudaMemcpyAsync(at(dst), at(src), static_cast<size_t>(state_bytes(dims_)), cudaMemcpyDeviceToDevice,
                        stream),
        "copying a state");
}

}  // namespace lily::cuda
