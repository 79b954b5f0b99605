// 4-bit codes as bf16 pairs, for products with bf16 activations.
#pragma once

#include "backend/cuda/kernels/device_ops.h"

namespace lily::cuda {

// Nibbles kShift and kShift + 4 of a word as two bf16 of value 128 + code, exactly.
template <int kShift>
__device__ __forceinline__ uint32_t nibbles_plus_128(uint32_t codes) {
#ifdef LILY_CUDA_EMULATED
  return ((codes >> (4 * kShift)) & 0x000f000fu) | 0x43004300u;
#else
  uint32_t r;
  asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(r) : "r"(codes >> (4 * kShift)));
  return r;
#endif
}

}  // namespace lily::cuda
