// How keys and values of 64 positions of one KV head lie in memory, bf16 or fp32.
//
// Keys:   [4 tiles][128 dim pairs][16 keys][2 dims]: a SIMD lane owns a key, so scores need no horizontal
// sums. Values: [8 chunks][64 keys][32 dims]: a lane owns a dim, and the accumulators of a chunk stay in
// registers while the
//         keys pass.
// A block of a layer is [KV head][keys, values].
#pragma once

#include <cstddef>
#include <cstdint>

#include "model/dims.h"
#include "plan/policy.h"

namespace lily::backend::cpu {

inline constexpr int kKvKeys = 64;      // positions of a block
inline constexpr int kKeyTile = 16;     // keys whose dims are interleaved
inline constexpr int kValueChunk = 32;  // dims of values that stand together
inline constexpr int64_t kKvPlane =
    kKvKeys * model::kHeadDim;  // elements of the keys, or of the values, of a head

inline constexpr int64_t key_index(int key, int dim) {
  return (key / kKeyTile * (model::kHeadDim / 2) + dim / 2) * (2 * kKeyTile) + key % kKeyTile * 2 + dim % 2;
}
inline constexpr int64_t value_index(int key, int dim) {
  return (dim / kValueChunk * kKvKeys + key) * kValueChunk + dim % kValueChunk;
}

// The KV blocks of one layer. Does not own.
struct KvLayer {
  std::byte* blocks = nullptr;
  plan::FloatType type = plan::FloatType::bf16;
  int n_kv_heads = 0;

  int64_t element_bytes() const { return type == plan::FloatType::bf16 ? 2 : 4; }
  int64_t block_bytes() const { return 2 * kKvPlane * n_kv_heads * element_bytes(); }
  std::byte* keys(int64_t block, int head) const {
    return blocks + block * block_bytes() + 2 * head * kKvPlane * element_bytes();
  }
  std::byte* values(int64_t block, int head) const { return keys(block, head) + kKvPlane * element_bytes(); }
};

// One head's key and value [256], rounded once to the cache's type, at place `key` of a block; and back.
void store_key(const KvLayer& kv, int64_t block, int head, int key, const float* k);
void store_value(const KvLayer& kv, int64_t block, int head, int key, const float* v);
void load_key(const KvLayer& kv, int64_t block, int head, int key, float* k);
void load_value(const KvLayer& kv, int64_t block, int head, int key, float* v);

}  // namespace lily::backend::cpu
