// Where keys and values of one attention layer lie. A block of 64 positions has K and V of all layers, one
// after the other; K and V each are
//   [kv head][64 positions][256] bf16
// and a layer's are found in the next block `block_bytes` further. A sequence's positions 64 i .. 64 i + 63
// are in block block_table[i].
#pragma once

#include <cstddef>
#include <cstdint>

namespace lily::cuda {

inline constexpr int kKvBlock = 64;  // backend::kKvBlockTokens
inline constexpr int kHeadCols = 256;
inline constexpr uint32_t kKvRowBytes = kHeadCols * 2;
inline constexpr uint32_t kKvHeadBytes = kKvBlock * kKvRowBytes;  // of K or V of a block

struct KvCache {
  unsigned char* k = nullptr;  // of block 0
  unsigned char* v = nullptr;
  int n_kv_heads = 0;
  uint32_t block_bytes = 0;  // from a block to the next, a multiple of 128
};

// K and V each for themselves, block behind block: a layer alone, for tests and benchmarks.
inline KvCache kv_apart(void* k, void* v, int n_kv_heads) {
  return {static_cast<unsigned char*>(k), static_cast<unsigned char*>(v), n_kv_heads,
          static_cast<uint32_t>(n_kv_heads) * kKvHeadBytes};
}

}  // namespace lily::cuda
