// From the file's layout of a 4-bit weight to pack/mma_q4.h's records, on the device while loading.
#pragma once

#include <cstdint>

#include "backend/cuda/kernels/host_types.h"

namespace lily::cuda {

struct RepackQ4 {
  const uint32_t* codes = nullptr;                      // [rows, cols / 8]
  const uint16_t *scales = nullptr, *biases = nullptr;  // [rows, cols / 64]
  int rows = 0, cols = 0;                               // the last tile is padded with zeros
  uint32_t* records = nullptr;
};
void launch_repack_q4(const RepackQ4& p, cudaStream_t stream);

}  // namespace lily::cuda
