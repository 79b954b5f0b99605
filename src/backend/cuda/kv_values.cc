#include "backend/cuda/kv_values.h"

#include <cstring>

#include "base/half.h"
#include "model/int8_group.h"

namespace lily::cuda {
namespace {

using model::kInt8Group;

// Where 64 values of a head's row lie: their codes or bf16 bits, and their scale.
struct GroupPlace {
  size_t values, scale;
};
GroupPlace place_of(KvForm form, int head, int position, size_t group) {
  const size_t rows = static_cast<size_t>(head) * kv_head_bytes(form), row = static_cast<size_t>(position);
  return {rows + row * kv_row_bytes(form) + group * (kv_row_bytes(form) / (kHeadCols / kInt8Group)),
          rows + kKvBlock * size_t{kv_row_bytes(form)} + row * kKvScaleBytes + group * sizeof(F16)};
}

// Calls f(place, index of the group's first float) for all groups of n tokens.
template <typename F>
void for_each_group(KvForm form, int n_heads, int n_tokens, const F& f) {
  size_t at = 0;
  for (int t = 0; t < n_tokens; ++t)
    for (int h = 0; h < n_heads; ++h)
      for (size_t g = 0; g < kHeadCols / kInt8Group; ++g, at += kInt8Group) f(place_of(form, h, t, g), at);
}

}  // namespace

std::vector<float> kv_values(std::span<const std::byte> part, KvForm form, int n_heads, int n_tokens) {
  std::vector<float> values(static_cast<size_t>(n_tokens) * static_cast<size_t>(n_heads) * kHeadCols);
  for_each_group(form, n_heads, n_tokens, [&](const GroupPlace& place, size_t at) {
    const auto group = std::span(values).subspan(at).first<kInt8Group>();
    if (form == KvForm::int8) {
      int8_t codes[kInt8Group];
      F16 scale;
      std::memcpy(codes, &part[place.values], sizeof codes);
      std::memcpy(&scale, &part[place.scale], sizeof scale);
      model::from_int8_group(scale, codes, group);
    } else {
      Bf16 bits[kInt8Group];
      std::memcpy(bits, &part[place.values], sizeof bits);
      for (size_t i = 0; i < kInt8Group; ++i) group[i] = to_float(bits[i]);
    }
  });
  return values;
}

void put_kv_values(std::span<std::byte> part, KvForm form, int n_heads, std::span<const float> values) {
  const int n_tokens = static_cast<int>(values.size()) / (n_heads * kHeadCols);
  for_each_group(form, n_heads, n_tokens, [&](const GroupPlace& place, size_t at) {
    const auto group = values.subspan(at).first<kInt8Group>();
    if (form == KvForm::int8) {
      int8_t codes[kInt8Group];
      const F16 scale = model::to_int8_group(group, codes);
      std::memcpy(&part[place.values], codes, sizeof codes);
      std::memcpy(&part[place.scale], &scale, sizeof scale);
    } else {
      Bf16 bits[kInt8Group];
      for (size_t i = 0; i < kInt8Group; ++i) bits[i] = to_bf16(group[i]);
      std::memcpy(&part[place.values], bits, sizeof bits);
    }
  });
}

}  // namespace lily::cuda
