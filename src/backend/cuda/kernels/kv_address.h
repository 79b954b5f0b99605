// Addresses inside kv_layout.h's caches.
#pragma once

#include "backend/cuda/kernels/device_ops.h"
#include "backend/cuda/kernels/kv_layout.h"

namespace lily::cuda {

// Elements from the start of k or v to a position's 256 values.
__device__ __forceinline__ size_t kv_offset(const int32_t* block_table, int n_kv_heads, int head,
                                            int position) {
  const size_t block = static_cast<size_t>(block_table[position / kKvBlock]);
  return ((block * static_cast<size_t>(n_kv_heads) + static_cast<size_t>(head)) * kKvBlock +
          static_cast<size_t>(position % kKvBlock)) *
         kHeadCols;
}

}  // namespace lily::cuda
