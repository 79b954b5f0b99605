// Caches of one attention layer as kernel tests make and read them: floats [block][64 positions][kv head]
// [256], NaN where nothing was written, and the bytes that stand for them.
#pragma once

#include <vector>

#include "backend/cuda/kv_values.h"

namespace lily::cuda {

inline std::vector<std::byte> kv_bytes(const std::vector<float>& values, KvForm form, int n_heads) {
  const size_t part = static_cast<size_t>(n_heads) * kv_head_bytes(form),
               floats = static_cast<size_t>(n_heads) * kKvBlock * kHeadCols;
  std::vector<std::byte> bytes(values.size() / floats * part);
  for (size_t b = 0; b < values.size() / floats; ++b)
    put_kv_values(std::span(bytes).subspan(b * part, part), form, n_heads,
                  std::span(values).subspan(b * floats, floats));
  return bytes;
}

inline std::vector<float> kv_floats(const std::vector<std::byte>& bytes, KvForm form, int n_heads) {
  const size_t part = static_cast<size_t>(n_heads) * kv_head_bytes(form);
  std::vector<float> values;
  for (size_t at = 0; at < bytes.size(); at += part) {
    const auto block = kv_values(std::span(bytes).subspan(at, part), form, n_heads, kKvBlock);
    values.insert(values.end(), block.begin(), block.end());
  }
  return values;
}

// How far a value in a group with this maximum may be from what was to be kept.
inline double kv_error(KvForm form, double largest) {
  return form == KvForm::int8 ? largest / 250 + 0x1p-18 : 0;
}

}  // namespace lily::cuda
