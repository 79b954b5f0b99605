// Addresses inside kv_layout.h's caches, and rows on their way in.
#pragma once

#include "backend/cuda/kernels/device_ops.h"
#include "backend/cuda/kernels/kv_int8.h"
#include "backend/cuda/kernels/kv_layout.h"

namespace lily::cuda {

// Bytes from the start of k or v to a head's rows in a block.
template <KvForm kForm>
__device__ __forceinline__ size_t kv_head_offset(const KvCache& cache, int32_t block, int head) {
  return static_cast<size_t>(static_cast<uint32_t>(block)) * cache.block_bytes +
         static_cast<uint32_t>(head) * kv_head_bytes(kForm);
}

// Bytes from a head's rows to a position's values or codes, and to its scales.
template <KvForm kForm>
__device__ __forceinline__ uint32_t kv_row_offset(int position) {
  return static_cast<uint32_t>(position % kKvBlock) * kv_row_bytes(kForm);
}
__device__ __forceinline__ uint32_t kv_scale_offset(int position) {
  return kKvBlock * kv_row_bytes(KvForm::int8) + static_cast<uint32_t>(position % kKvBlock) * kKvScaleBytes;
}

// Puts a position's 256 values of a head into their place in `part`, k or v; by a warp, bits: columns
// 8 l .. 8 l + 7 in lane l, as bf16.
template <KvForm kForm>
__device__ __forceinline__ void store_kv_row(const KvCache& cache, unsigned char* part,
                                             const int32_t* block_table, int head, int position, uint4 bits) {
  unsigned char* const rows = part + kv_head_offset<kForm>(cache, block_table[position / kKvBlock], head);
  unsigned char* const row = rows + kv_row_offset<kForm>(position);
  if constexpr (kForm == KvForm::bf16) reinterpret_cast<uint4*>(row)[lane_id()] = bits;
  else put_int8_row(quantised_row(bits), row, rows + kv_scale_offset(position));
}

}  // namespace lily::cuda
