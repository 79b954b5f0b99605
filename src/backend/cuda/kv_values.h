// K or V of one layer's block between its bytes (kernels/kv_layout.h) and floats [tokens][kv head][256], on
// the host: for tests and saved sessions.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "backend/cuda/kernels/kv_layout.h"

namespace lily::cuda {

std::vector<float> kv_values(std::span<const std::byte> part, KvForm form, int n_heads, int n_tokens);
// Of positions from 0 on; the others keep their bytes.
void put_kv_values(std::span<std::byte> part, KvForm form, int n_heads, std::span<const float> values);

}  // namespace lily::cuda
