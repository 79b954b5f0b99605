#include "backend/cuda/check.h"

#include "base/error.h"

namespace lily::cuda {

void check(cudaError_t status, const char* doing) {
  if (status != cudaSuccess)
    fail(Fault::device, "CUDA: {} failed: {} ({})", doing, cudaGetErrorString(status),
         cudaGetErrorName(status));
}

}  // namespace lily::cuda
