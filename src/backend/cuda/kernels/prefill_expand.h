// P1's ablation: 4-bit records as bf16 operands in memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cuda/kernels/host_types.h"

namespace lily::cuda {

inline constexpr size_t kExpandedRecordBytes = 2048;  // of 16 x 64 weights, in the order of A fragments

struct ExpandQ4 {
  const std::byte* records;  // pack/mma_q4.h
  int64_t n_records;
  std::byte* expanded;  // [n_records] of kExpandedRecordBytes
};
void expand_q4_prefill(const ExpandQ4& p, cudaStream_t stream);

}  // namespace lily::cuda
