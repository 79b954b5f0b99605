// CUDA's return codes as lily::Error.
#pragma once

#include <cuda_runtime_api.h>

#include "base/error.h"

namespace lily::cuda {

inline void check(cudaError_t status, const char* doing) {
  if (status != cudaSuccess)
    fail(Fault::device, "CUDA: {} failed: {} ({})", doing, cudaGetErrorString(status), cudaGetErrorName(status));
}

}  // namespace lily::cuda
