#include "backend/metal/memory.h"

#include "backend/metal/kernels/params.h"
#include "base/error.h"
#include "base/half.h"

namespace lily::metal {
namespace {

using model::kDeltaHeadDim;
using model::kHeadDim;

constexpr int kStateRows = model::kConvTaps - 1;
constexpr int kChannels = static_cast<int>(kernels::kMixerChannels);

template <typename T>
std::vector<T> read_values(const Buffer& buffer, size_t offset, size_t n) {
  std::vector<T> values(n);
  buffer.read(offset, std::as_writable_bytes(std::span(values)));
  return values;
}

}  // namespace

Memory::Memory(Device& gpu, const model::Dims& dims, const backend::MemorySpec& spec)
    : dims_(dims), spec_(spec) {
  const auto make = [&](size_t bytes, int layer, const char* what) {
    return gpu.make_buffer(bytes, BufferUse::mutable_data, fmt::format("layers.{}.{}", layer, what));
  };
  const auto n_slots = static_cast<size_t>(spec.n_state_slots);
  const auto n_blocks = static_cast<size_t>(spec.n_kv_blocks);
  for (int layer = 0; layer < dims.n_layers; ++layer) {
    if (dims.mixer(layer) == model::Mixer::delta) {
      delta_.push_back(make(n_slots * delta_slot_bytes(), layer, "delta_state"));
      conv_.push_back(make(n_slots * conv_slot_bytes(), layer, "conv_state"));
    } else {
      k_.push_back(make(n_blocks * block_bytes(), layer, "k"));
      v_.push_back(make(n_blocks * block_bytes(), layer, "v"));
    }
  }
  token_slots_ =
      gpu.make_buffer(static_cast<size_t>(spec.n_token_slots) * 4, BufferUse::mutable_data, "token slots");
}

size_t Memory::delta_slot_bytes() const { return static_cast<size_t>(dims_.delta_state_bytes_per_layer()); }
size_t Memory::conv_slot_bytes() const {
  return static_cast<size_t>(dims_.n_value_heads * kStateRows * kChannels) * sizeof(Bf16);
}
size_t Memory::block_bytes() const {
  return static_cast<size_t>(backend::kKvBlockTokens * dims_.kv_width()) * sizeof(Bf16);
}

size_t Memory::total_bytes(const model::Dims& dims, const backend::MemorySpec& spec) {
  const auto conv = static_cast<size_t>(dims.n_value_heads * kStateRows * kChannels) * sizeof(Bf16);
  const auto block = static_cast<size_t>(backend::kKvBlockTokens * dims.kv_width()) * sizeof(Bf16);
  return static_cast<size_t>(spec.n_state_slots * dims.n_delta_layers()) *
             (static_cast<size_t>(dims.delta_state_bytes_per_layer()) + conv) +
         static_cast<size_t>(spec.n_kv_blocks) * static_cast<size_t>(dims.n_attention_layers()) * 2 * block +
         static_cast<size_t>(spec.n_token_slots) * 4;
}

std::vector<float> Memory::read_delta(int slot, int layer) const {
  const size_t n = delta_slot_bytes() / 4;
  const auto stored =
      read_values<float>(delta_state(layer), static_cast<size_t>(slot) * delta_slot_bytes(), n);
  std::vector<float> canonical(n);
  constexpr size_t d = kDeltaHeadDim;
  for (size_t h = 0; h < n / (d * d); ++h)
    for (size_t dv = 0; dv < d; ++dv)
      for (size_t dk = 0; dk < d; ++dk) canonical[(h * d + dk) * d + dv] = stored[(h * d + dv) * d + dk];
  return canonical;
}

void Memory::write_delta(int slot, int layer, std::span<const float> data) {
  const size_t n = delta_slot_bytes() / 4;
  LILY_CHECK(data.size() == n, "{} values of a delta state of {}", data.size(), n);
  std::vector<float> stored(n);
  constexpr size_t d = kDeltaHeadDim;
  for (size_t h = 0; h < n / (d * d); ++h)
    for (size_t dv = 0; dv < d; ++dv)
      for (size_t dk = 0; dk < d; ++dk) stored[(h * d + dv) * d + dk] = data[(h * d + dk) * d + dv];
  delta_state(layer).write(static_cast<size_t>(slot) * delta_slot_bytes(), std::as_bytes(std::span(stored)));
}

int64_t Memory::channel(int head, int c) const {
  if (c >= 2 * kDeltaHeadDim) return 2 * dims_.key_width() + head * kDeltaHeadDim + c - 2 * kDeltaHeadDim;
  return c / kDeltaHeadDim * dims_.key_width() + head / model::kValueHeadsPerKey * kDeltaHeadDim +
         c % kDeltaHeadDim;
}

std::vector<float> Memory::read_conv(int slot, int layer) const {
  const auto stored = read_values<Bf16>(conv_state(layer), static_cast<size_t>(slot) * conv_slot_bytes(),
                                        conv_slot_bytes() / sizeof(Bf16));
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
  std::vector<Bf16> stored(conv_slot_bytes() / sizeof(Bf16));
  for (int h = 0; h < dims_.n_value_heads; ++h)
    for (int row = 0; row < kStateRows; ++row)
      for (int c = 0; c < kChannels; ++c)
        stored[static_cast<size_t>((h * kStateRows + row) * kChannels + c)] =
            to_bf16(data[static_cast<size_t>(row * dims_.conv_channels() + channel(h, c))]);
  conv_state(layer).write(static_cast<size_t>(slot) * conv_slot_bytes(), std::as_bytes(std::span(stored)));
}

std::vector<float> Memory::read_kv(bool is_k, int layer, int block, int n_tokens) const {
  std::vector<float> canonical(static_cast<size_t>(n_tokens * dims_.kv_width()));
  const Buffer& cache = is_k ? k_cache(layer) : v_cache(layer);
  for (int h = 0; h < dims_.n_kv_heads; ++h) {
    const size_t first = static_cast<size_t>(block) * block_bytes() +
                         static_cast<size_t>(h * backend::kKvBlockTokens * kHeadDim) * sizeof(Bf16);
    const auto rows = read_values<Bf16>(cache, first, static_cast<size_t>(n_tokens * kHeadDim));
    for (int t = 0; t < n_tokens; ++t)
      for (int d = 0; d < kHeadDim; ++d)
        canonical[static_cast<size_t>(t * dims_.kv_width() + h * kHeadDim + d)] =
            to_float(rows[static_cast<size_t>(t * kHeadDim + d)]);
  }
  return canonical;
}

void Memory::write_kv(bool is_k, int layer, int block, int n_tokens, std::span<const float> data) {
  LILY_CHECK(data.size() == static_cast<size_t>(n_tokens * dims_.kv_width()), "{} values of {} tokens",
             data.size(), n_tokens);
  Buffer& cache = is_k ? k_cache(layer) : v_cache(layer);
  std::vector<Bf16> rows(static_cast<size_t>(n_tokens * kHeadDim));
  for (int h = 0; h < dims_.n_kv_heads; ++h) {
    for (int t = 0; t < n_tokens; ++t)
      for (int d = 0; d < kHeadDim; ++d)
        rows[static_cast<size_t>(t * kHeadDim + d)] =
            to_bf16(data[static_cast<size_t>(t * dims_.kv_width() + h * kHeadDim + d)]);
    cache.write(static_cast<size_t>(block) * block_bytes() +
                    static_cast<size_t>(h * backend::kKvBlockTokens * kHeadDim) * sizeof(Bf16),
                std::as_bytes(std::span(rows)));
  }
}

}  // namespace lily::metal
