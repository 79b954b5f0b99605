// How keys and values of 64 positions of one KV head lie in memory: bf16, fp32, or int8 (model/int8_group.h).
//
// Keys:   [4 tiles][128 dim pairs][16 keys][2 dims]: a SIMD lane owns a key, so scores need no horizontal
//         sums. int8: [4 tiles][256 dims][16 keys], as codes are widened 16 at a time.
// Values: [8 chunks][64 keys][32 dims]: a lane owns a dim, and the accumulators of a chunk stay in registers
//         while the keys pass.
// int8 planes end in their scales, fp16: [4 groups of dims][64 keys].
// A block of a layer is [KV head][keys, values]. The blocks of all layers stand together: what is given back
// to the system is one piece.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/half.h"
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
inline constexpr int64_t int8_key_index(int key, int dim) {
  return (key / kKeyTile * model::kHeadDim + dim) * kKeyTile + key % kKeyTile;
}
inline constexpr int64_t value_index(int key, int dim) {
  return (dim / kValueChunk * kKvKeys + key) * kValueChunk + dim % kValueChunk;
}

// The KV blocks of one layer. Does not own.
struct KvLayer {
  std::byte* blocks = nullptr;
  plan::KvType type = plan::KvType::bf16;
  int n_kv_heads = 0;
  int64_t stride = 0;  // bytes from a block to the next

  int64_t plane_bytes() const { return plan::kv_bytes(type, kKvPlane); }
  int64_t block_bytes() const { return 2 * n_kv_heads * plane_bytes(); }
  std::byte* keys(int64_t block, int head) const {
    return blocks + block * stride + 2 * head * plane_bytes();
  }
  std::byte* values(int64_t block, int head) const { return keys(block, head) + plane_bytes(); }
};
inline F16* int8_scales(std::byte* plane) { return reinterpret_cast<F16*>(plane + kKvPlane); }

// One head's key and value [256], rounded once to the cache's type, at place `key` of a block; and back.
void store_key(const KvLayer& kv, int64_t block, int head, int key, const float* k);
void store_value(const KvLayer& kv, int64_t block, int head, int key, const float* v);
void load_key(const KvLayer& kv, int64_t block, int head, int key, float* k);
void load_value(const KvLayer& kv, int64_t block, int head, int key, float* v);

}  // namespace lily::backend::cpu
