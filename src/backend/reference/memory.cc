#include "backend/reference/memory.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace lily::backend::reference {
namespace {

size_t delta_floats(const model::Dims& dims) {
  return static_cast<size_t>(dims.delta_state_bytes_per_layer()) / sizeof(float);
}
size_t conv_floats(const model::Dims& dims) {
  return static_cast<size_t>((model::kConvTaps - 1) * dims.conv_channels());
}
size_t rows_bytes(const model::Dims& dims, plan::KvType kv) {
  return KvRows::n_bytes(kv, static_cast<size_t>(kKvBlockTokens * dims.kv_width()));
}

std::vector<float> floats_of(std::span<const std::byte> bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

void write(std::span<std::byte> to, std::span<const float> values) {
  LILY_CHECK(values.size_bytes() == to.size(), "{} values for {} bytes", values.size(), to.size());
  std::memcpy(to.data(), values.data(), to.size());
}

}  // namespace

size_t Memory::state_bytes(const model::Dims& dims) {
  return static_cast<size_t>(dims.n_delta_layers()) * (delta_floats(dims) + conv_floats(dims)) *
         sizeof(float);
}

size_t Memory::block_bytes(const model::Dims& dims, plan::KvType kv) {
  return static_cast<size_t>(dims.n_attention_layers()) * 2 * rows_bytes(dims, kv);
}

void Memory::reserve(const model::Dims& dims, const MemorySpec& spec, plan::KvType kv) {
  dims_ = dims;
  spec_ = spec;
  kv_ = kv;
  block_bytes_ = block_bytes(dims, kv);
  const auto n_states = static_cast<size_t>(spec.n_state_slots);
  const auto n_blocks = static_cast<size_t>(spec.n_kv_blocks);
  if (spec.shared_places) {
    LILY_CHECK(n_blocks % n_states == 0 && n_blocks / n_states * block_bytes_ >= state_bytes(dims),
               "{} blocks in {} places", n_blocks, n_states);
    state_stride_ = n_blocks / n_states * block_bytes_;
  } else {
    state_stride_ = state_bytes(dims);
  }
  arena_.assign(n_states * state_stride_, KvRows::kUnwritten);
  blocks_.assign(spec.shared_places ? 0 : n_blocks * block_bytes_, KvRows::kUnwritten);
  tokens.assign(static_cast<size_t>(spec.n_token_slots), -1);
}

std::span<std::byte> Memory::state(StateSlot slot) {
  const auto index = static_cast<int32_t>(slot);
  LILY_CHECK(index >= 0 && index < spec_.n_state_slots, "state slot {} of {}", index, spec_.n_state_slots);
  return std::span(arena_).subspan(static_cast<size_t>(index) * state_stride_, state_bytes(dims_));
}

std::span<std::byte> Memory::part(StateSlot slot, int layer, Part part) {
  const size_t delta = delta_floats(dims_) * sizeof(float), conv = conv_floats(dims_) * sizeof(float);
  const auto of_layer =
      state(slot).subspan(static_cast<size_t>(dims_.mixer_index(layer)) * (delta + conv), delta + conv);
  return part == Part::delta ? of_layer.first(delta) : of_layer.last(conv);
}

std::vector<float> Memory::delta(StateSlot slot, int layer) {
  return floats_of(part(slot, layer, Part::delta));
}
std::vector<float> Memory::conv(StateSlot slot, int layer) {
  return floats_of(part(slot, layer, Part::conv));
}
void Memory::write_delta(StateSlot slot, int layer, std::span<const float> values) {
  write(part(slot, layer, Part::delta), values);
}
void Memory::write_conv(StateSlot slot, int layer, std::span<const float> values) {
  write(part(slot, layer, Part::conv), values);
}
void Memory::copy_state(StateSlot src, StateSlot dst) {
  const auto from = state(src);
  std::copy(from.begin(), from.end(), state(dst).begin());
}

KvRows Memory::rows(int block, int layer, size_t k_or_v) {
  LILY_CHECK(block >= 0 && block < spec_.n_kv_blocks, "KV block {} of {}", block, spec_.n_kv_blocks);
  const size_t n_bytes = rows_bytes(dims_, kv_);
  const size_t first = static_cast<size_t>(block) * block_bytes_ +
                       (static_cast<size_t>(dims_.mixer_index(layer)) * 2 + k_or_v) * n_bytes;
  return {kv_, std::span(spec_.shared_places ? arena_ : blocks_).subspan(first, n_bytes)};
}

}  // namespace lily::backend::reference
