// Where keys and values of one attention layer lie: K and V each have
//   [block][kv head][64 positions][256] bf16
// A sequence's positions 64 i .. 64 i + 63 are in block block_table[i].
#pragma once

#include <cstddef>
#include <cstdint>

namespace lily::cuda {

inline constexpr int kKvBlock = 64;  // backend::kKvBlockTokens
inline constexpr int kHeadCols = 256;

struct KvCache {
  uint16_t* k = nullptr;
  uint16_t* v = nullptr;
  int n_kv_heads = 0;
};

}  // namespace lily::cuda
