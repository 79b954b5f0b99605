#include "backend/metal/memory.h"

#include <algorithm>

#include "backend/metal/kernels/params.h"
#include "base/error.h"
#include "base/half.h"
#include "model/int8_group.h"

namespace lily::metal {
namespace {

using model::kDeltaHeadDim;
using model::kHeadDim;
using model::kInt8Group;

constexpr int kStateRows = model::kConvTaps - 1;
// Of a KV head's plane; 8-bit codes take as many bytes and stand in front of their scales.
constexpr size_t kPlaneValues = size_t{backend::kKvBlockTokens} * kHeadDim;
constexpr int kChannels = static_cast<int>(kernels::kMixerChannels);

template <typename T>
std::vector<T> read_values(const Buffer& buffer, size_t offset, size_t n) {
  std::vector<T> values(n);
  buffer.read(offset, std::as_writable_bytes(std::span(values)));
  return values;
}

}  // namespace

size_t MemoryLayout::conv_bytes() const {
  return static_cast<size_t>(dims_.n_value_heads * kStateRows * kChannels) * sizeof(Bf16);
}
size_t MemoryLayout::state_bytes() const {
  return static_cast<size_t>(dims_.n_delta_layers()) * (delta_bytes() + conv_bytes());
}
size_t MemoryLayout::kv_bytes() const {
  return static_cast<size_t>(plan::kv_bytes(kv_type_, int64_t{backend::kKvBlockTokens} * dims_.kv_width()));
}
size_t MemoryLayout::block_bytes() const {
  return static_cast<size_t>(dims_.n_attention_layers()) * 2 * kv_bytes();
}
int MemoryLayout::blocks_per_state() const {
  const size_t block = block_bytes();
  return block == 0 ? 0 : static_cast<int>((state_bytes() + block - 1) / block);
}
size_t MemoryLayout::slot_stride(bool shared_places) const {
  return shared_places ? static_cast<size_t>(blocks_per_state()) * block_bytes() : state_bytes();
}
size_t MemoryLayout::conv_offset(int layer) const {
  return static_cast<size_t>(dims_.n_delta_layers()) * delta_bytes() + index(layer) * conv_bytes();
}
size_t MemoryLayout::states_bytes(const backend::MemorySpec& spec) const {
  return spec.shared_places ? 0 : static_cast<size_t>(spec.n_state_slots) * state_bytes();
}
size_t MemoryLayout::blocks_bytes(const backend::MemorySpec& spec) const {
  return static_cast<size_t>(spec.n_kv_blocks) * block_bytes();
}
size_t MemoryLayout::total_bytes(const backend::MemorySpec& spec) const {
  return states_bytes(spec) + blocks_bytes(spec) + static_cast<size_t>(spec.n_token_slots) * 4;
}
size_t MemoryLayout::largest_buffer(const backend::MemorySpec& spec) const {
  return std::max(states_bytes(spec), blocks_bytes(spec));
}

Memory::Memory(Device& gpu, const model::Dims& dims, const backend::MemorySpec& spec, plan::KvType kv_type)
    : dims_(dims), spec_(spec), kv_type_(kv_type), layout_(dims, kv_type) {
  LILY_CHECK(!spec.shared_places || (layout_.blocks_per_state() > 0 &&
                                     spec.n_kv_blocks == spec.n_state_slots * layout_.blocks_per_state()),
             "{} blocks in the places of {} states", spec.n_kv_blocks, spec.n_state_slots);
  const auto make = [&](size_t n, const char* what) {
    return n == 0 ? nullptr : gpu.make_buffer(n, BufferUse::mutable_data, what);
  };
  states_ = make(layout_.states_bytes(spec), "states");
  blocks_ = make(layout_.blocks_bytes(spec), spec.shared_places ? "places" : "KV blocks");
  token_slots_ = make(static_cast<size_t>(spec.n_token_slots) * 4, "token slots");
}

MemoryPart Memory::slots(size_t offset, size_t length) const {
  return {(spec_.shared_places ? blocks_ : states_).get(), offset, length, slot_stride(),
          static_cast<size_t>(spec_.n_state_slots)};
}
MemoryPart Memory::blocks(size_t offset) const {
  return {blocks_.get(), offset, layout_.kv_bytes(), block_stride(), static_cast<size_t>(spec_.n_kv_blocks)};
}

std::vector<float> Memory::read_delta(int slot, int layer) const {
  const size_t n = layout_.delta_bytes() / 4;
  const MemoryPart part = delta_state(layer);
  const auto stored = read_values<float>(*part.buffer, part.at(slot), n);
  std::vector<float> canonical(n);
  constexpr size_t d = kDeltaHeadDim;
  for (size_t h = 0; h < n / (d * d); ++h)
    for (size_t dv = 0; dv < d; ++dv)
      for (size_t dk = 0; dk < d; ++dk) canonical[(h * d + dk) * d + dv] = stored[(h * d + dv) * d + dk];
  return canonical;
}

void Memory::write_delta(int slot, int layer, std::span<const float> data) {
  const size_t n = layout_.delta_bytes() / 4;
  LILY_CHECK(data.size() == n, "{} values of a delta state of {}", data.size(), n);
  std::vector<float> stored(n);
  constexpr size_t d = kDeltaHeadDim;
  for (size_t h = 0; h < n / (d * d); ++h)
    for (size_t dv = 0; dv < d; ++dv)
      for (size_t dk = 0; dk < d; ++dk) stored[(h * d + dv) * d + dk] = data[(h * d + dk) * d + dv];
  const MemoryPart part = delta_state(layer);
  part.buffer->write(part.at(slot), std::as_bytes(std::span(stored)));
}

int64_t Memory::channel(int head, int c) const {
  if (c >= 2 * kDeltaHeadDim) return 2 * dims_.key_width() + head * kDeltaHeadDim + c - 2 * kDeltaHeadDim;
  return c / kDeltaHeadDim * dims_.key_width() + head / model::kValueHeadsPerKey * kDeltaHeadDim +
         c % kDeltaHeadDim;
}

std::vector<float> Memory::read_conv(int slot, int layer) const {
  const MemoryPart part = conv_state(layer);
  const auto stored = read_values<Bf16>(*part.buffer, part.at(slot), part.length / sizeof(Bf16));
  std::vector<float> canonical(static_cast<size_t>(kStateRows * dims_.conv_channels()));
  for (int h = 0; h < dims_.n_value_heads; ++h)
    for (int row = 0; row < kStateRows; ++row)
      for (int c = 0; c < kChannels; ++c)
        canonical[static_cast<size_t>(row * dims_.conv_channels() + channel(h, c))] =
            to_float(stored[static_cast<size_t>((h * kStateRows + row) * kChannels + c)]);
  return canonical;
}

void Memory::write_conv(int slot, int layer, std::span<const float> data) {
  LILY_CHECK(data.size() == static_cast<size_t>(kStateRows * dims_.conv_channels()),
             "{} values of a conv state", data.size());
  const MemoryPart part = conv_state(layer);
  std::vector<Bf16> stored(part.length / sizeof(Bf16));
  for (int h = 0; h < dims_.n_value_heads; ++h)
    for (int row = 0; row < kStateRows; ++row)
      for (int c = 0; c < kChannels; ++c)
        stored[static_cast<size_t>((h * kStateRows + row) * kChannels + c)] =
            to_bf16(data[static_cast<size_t>(row * dims_.conv_channels() + channel(h, c))]);
  part.buffer->write(part.at(slot), std::as_bytes(std::span(stored)));
}

// Rows [n_tokens][256] of one KV head's plane.
std::vector<float> Memory::read_rows(const MemoryPart& part, size_t plane, int n_tokens) const {
  const auto n = static_cast<size_t>(n_tokens * kHeadDim);
  std::vector<float> rows(n);
  if (kv_type_ == plan::KvType::bf16) {
    const auto stored = read_values<Bf16>(*part.buffer, plane, n);
    for (size_t i = 0; i < n; ++i) rows[i] = to_float(stored[i]);
    return rows;
  }
  const auto codes = read_values<int8_t>(*part.buffer, plane, n);
  const auto scales = read_values<F16>(*part.buffer, plane + kPlaneValues, n / kInt8Group);
  for (size_t i = 0; i < n; i += kInt8Group)
    model::from_int8_group(scales[i / kInt8Group], std::span(codes).subspan(i).first<kInt8Group>(),
                           std::span(rows).subspan(i).first<kInt8Group>());
  return rows;
}

void Memory::write_rows(const MemoryPart& part, size_t plane, std::span<const float> rows) {
  if (kv_type_ == plan::KvType::bf16) {
    std::vector<Bf16> stored(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) stored[i] = to_bf16(rows[i]);
    part.buffer->write(plane, std::as_bytes(std::span(stored)));
    return;
  }
  std::vector<int8_t> codes(rows.size());
  std::vector<F16> scales(rows.size() / kInt8Group);
  for (size_t i = 0; i < rows.size(); i += kInt8Group)
    scales[i / kInt8Group] = model::to_int8_group(rows.subspan(i).first<kInt8Group>(),
                                                  std::span(codes).subspan(i).first<kInt8Group>());
  part.buffer->write(plane, std::as_bytes(std::span(codes)));
  part.buffer->write(plane + kPlaneValues, std::as_bytes(std::span(scales)));
}

std::vector<float> Memory::read_kv(bool is_k, int layer, int block, int n_tokens) const {
  std::vector<float> canonical(static_cast<size_t>(n_tokens * dims_.kv_width()));
  const MemoryPart part = is_k ? k_cache(layer) : v_cache(layer);
  const size_t plane_bytes = part.length / static_cast<size_t>(dims_.n_kv_heads);
  for (int h = 0; h < dims_.n_kv_heads; ++h) {
    const auto rows = read_rows(part, part.at(block) + static_cast<size_t>(h) * plane_bytes, n_tokens);
    for (int t = 0; t < n_tokens; ++t)
      std::copy_n(rows.begin() + t * kHeadDim, kHeadDim,
                  canonical.begin() + t * dims_.kv_width() + h * kHeadDim);
  }
  return canonical;
}

void Memory::write_kv(bool is_k, int layer, int block, int n_tokens, std::span<const float> data) {
  LILY_CHECK(data.size() == static_cast<size_t>(n_tokens * dims_.kv_width()), "{} values of {} tokens",
             data.size(), n_tokens);
  const MemoryPart part = is_k ? k_cache(layer) : v_cache(layer);
  const size_t plane_bytes = part.length / static_cast<size_t>(dims_.n_kv_heads);
  std::vector<float> rows(static_cast<size_t>(n_tokens * kHeadDim));
  for (int h = 0; h < dims_.n_kv_heads; ++h) {
    for (int t = 0; t < n_tokens; ++t)
      std::copy_n(data.begin() + t * dims_.kv_width() + h * kHeadDim, kHeadDim, rows.begin() + t * kHeadDim);
    write_rows(part, part.at(block) + static_cast<size_t>(h) * plane_bytes, rows);
  }
}

}  // namespace lily::metal
