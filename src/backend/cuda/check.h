// CUDA's return codes as lily::Error, and checks of our own mistakes. Free of fmt, which nvcc does not take.
#pragma once

#include <cuda_runtime_api.h>

namespace lily::cuda {

// Throws Fault::device unless status is cudaSuccess; `doing` names what failed.
void check(cudaError_t status, const char* doing);

// LILY_CHECK for .cu files.
void require(bool holds, const char* what);

}  // namespace lily::cuda
