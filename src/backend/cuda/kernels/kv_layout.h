// Where keys and values of one attention layer lie. A block of 64 positions has K and V of all layers, one
// after the other, and a layer's are found in the next block `block_bytes` further. K and V each are
//   bf16: [kv head][64 positions][256]
//   int8: [kv head]: [64 positions][256] codes, then [64 positions][4] fp16 scales of 64 codes each
//         (model/int8_group.h)
// A sequence's positions 64 i .. 64 i + 63 are in block block_table[i].
#pragma once

#include <cstddef>
#include <cstdint>

namespace lily::cuda {

inline constexpr int kKvBlock = 64;  // backend::kKvBlockTokens
inline constexpr int kHeadCols = 256;

enum class KvForm { bf16, int8 };
inline constexpr uint32_t kKvScaleBytes = kHeadCols / 64 * 2;  // of a position of a head, int8

// Bytes of a position's values or codes, and of all of a head in K or V of a block: a multiple of 128.
constexpr uint32_t kv_row_bytes(KvForm form) { return form == KvForm::int8 ? kHeadCols : kHeadCols * 2; }
constexpr uint32_t kv_head_bytes(KvForm form) {
  return kKvBlock * (kv_row_bytes(form) + (form == KvForm::int8 ? kKvScaleBytes : 0));
}

struct KvCache {
  unsigned char* k = nullptr;  // of block 0
  unsigned char* v = nullptr;
  int n_kv_heads = 0;
  uint32_t block_bytes = 0;  // from a block to the next, a multiple of 128
  KvForm form = KvForm::bf16;
};

// K and V each for themselves, block behind block: a layer alone, for tests and benchmarks.
inline KvCache kv_apart(void* k, void* v, int n_kv_heads, KvForm form = KvForm::bf16) {
  return {static_cast<unsigned char*>(k), static_cast<unsigned char*>(v), n_kv_heads,
          static_cast<uint32_t>(n_kv_heads) * kv_head_bytes(form), form};
}

}  // namespace lily::cuda
