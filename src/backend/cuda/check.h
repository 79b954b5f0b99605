// CUDA's return codes as lily::Error.
#pragma once

#include <cuda_runtime_api.h>

namespace lily::cuda {

// Throws Error(Fault::device) unless status is success.
void check(cudaError_t status, const char* doing);

}  // namespace lily::cuda
