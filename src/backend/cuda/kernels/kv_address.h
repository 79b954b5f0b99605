// Addresses inside kv_layout.h's caches.
#pragma once

#include "backend/cuda/kernels/device_ops.h"
#include "backend/cuda/kernels/kv_layout.h"

namespace lily::cuda {

// Bytes from the start of k or v to a head's rows in a block.
__device__ __forceinline__ size_t kv_head_offset(const KvCache& cache, int32_t block, int head) {
  return static_cast<size_t>(static_cast<uint32_t>(block)) * cache.block_bytes +
         static_cast<uint32_t>(head) * kKvHeadBytes;
}

// Bytes from the start of k or v to a position's 256 values.
__device__ __forceinline__ size_t kv_offset(const KvCache& cache, const int32_t* block_table, int head,
                                            int position) {
  return kv_head_offset(cache, block_table[position / kKvBlock], head) +
         static_cast<uint32_t>(position % kKvBlock) * kKvRowBytes;
}

}  // namespace lily::cuda
