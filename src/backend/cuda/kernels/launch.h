// Launching a kernel that takes one parameter struct: on a stream (or into a graph under capture), or
// emulated.
#pragma once

#include "backend/cuda/kernels/device_ops.h"
#ifndef LILY_CUDA_EMULATED
#include "backend/cuda/check.h"
#endif

namespace lily::cuda {

struct LaunchShape {
  dim3 grid;
  unsigned threads = 256;
  unsigned shared_bytes = 0;
  unsigned cluster = 1;  // blocks along x that share a cluster
};

// Shared memory to ask for so that an SM takes one block of a kernel: with two on some SMs and none on others
// the kernel takes twice as long. A small kernel before or after it fits beside it.
inline constexpr unsigned kAloneBytes = 116000;  // more than half of an SM's 228 KB
inline unsigned alone_on_an_sm(unsigned bytes) { return bytes > kAloneBytes ? bytes : kAloneBytes; }

template <typename Params>
void launch(void (*kernel)(Params), const Params& params, const LaunchShape& shape, cudaStream_t stream) {
#ifdef LILY_CUDA_EMULATED
  static_cast<void>(stream);
  // By value: a captured launch runs later.
  emulated::run_grid(shape.grid, shape.threads, shape.cluster, shape.shared_bytes,
                     [kernel, params] { kernel(params); });
#else
  if (shape.shared_bytes > (48u << 10))
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shape.shared_bytes)),
          "raising a kernel's shared memory limit");
  // One split of L1 and shared memory for all kernels: where it changes, an SM drains before the next kernel
  // may start.
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        "choosing a kernel's shared memory split");
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  // Every kernel waits (pdl_wait) before it touches what an earlier one wrote, so all may start early.
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  config.numAttrs = 1;
  if (shape.cluster > 1) {
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = shape.cluster;
    attributes[1].val.clusterDim.y = 1;
    attributes[1].val.clusterDim.z = 1;
    config.numAttrs = 2;
  }
  config.attrs = attributes;
  check(cudaLaunchKernelEx(&config, kernel, params), "launching a kernel");
#endif
}

}  // namespace lily::cuda
