// The part of CUDA's runtime that the backend's host code uses, on the CPU: device memory is host memory,
// every call is done when it returns, a captured graph is the list of its launches. With this in front of
// the real header the whole backend runs emulated (emulated_backend_test).
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "tests/backend/cuda/emulation/emulated_device.h"

enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2, cudaErrorNotReady = 600 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin
};
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaStreamCaptureModeThreadLocal = 1 };
struct cudaDeviceProp {
  char name[64];
  int multiProcessorCount, major, minor;
  size_t totalGlobalMem;
};
using cudaEvent_t = void*;
using cudaGraph_t = lily::cuda::emulated::Graph*;
using cudaGraphExec_t = lily::cuda::emulated::Graph*;
using cudaGraphNode_t = void*;
struct cudaGraphEdgeData {
  int type;
};

#define CUDART_VERSION 13000

inline const char* cudaGetErrorString(cudaError_t) { return "out of memory"; }
inline const char* cudaGetErrorName(cudaError_t) { return "cudaErrorMemoryAllocation"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* n) { return *n = 1, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = which == cudaDevAttrComputeCapabilityMajor         ? 9
           : which == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 227 << 10
                                                              : 0;
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  // Fewer multiprocessors than a test has work for: the loops of persistent kernels turn.
  *p = {"emulated", 3, 9, 0, size_t{1} << 30};
  return cudaSuccess;
}

inline cudaError_t cudaMalloc(void** p, size_t n) {
  *p = std::aligned_alloc(256, (n + 255) / 256 * 256);
  if (*p) std::memset(*p, 0xff, n);
  return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline cudaError_t cudaFree(void* p) { return std::free(p), cudaSuccess; }
inline cudaError_t cudaMallocHost(void** p, size_t n) { return cudaMalloc(p, n); }
inline cudaError_t cudaFreeHost(void* p) { return cudaFree(p); }
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) {
  return std::memcpy(to, from, n), cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, n, kind);
}
inline cudaError_t cudaMemset(void* to, int byte, size_t n) { return std::memset(to, byte, n), cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* to, int byte, size_t n, cudaStream_t) {
  return cudaMemset(to, byte, n);
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return *s = nullptr, cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return *e = nullptr, cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }

inline cudaError_t cudaStreamBeginCapture(cudaStream_t, int) {
  return lily::cuda::emulated::begin_capture(), cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  return *graph = lily::cuda::emulated::end_capture(), cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  return *exec = new lily::cuda::emulated::Graph(*graph), cudaSuccess;
}
// Launches follow one another anyway: a captured graph has no edges.
inline cudaError_t cudaGraphGetEdges(cudaGraph_t, cudaGraphNode_t*, cudaGraphNode_t*, cudaGraphEdgeData*,
                                     size_t* n) {
  return *n = 0, cudaSuccess;
}
inline cudaError_t cudaGraphRemoveDependencies(cudaGraph_t, const cudaGraphNode_t*, const cudaGraphNode_t*,
                                               const cudaGraphEdgeData*, size_t) {
  return cudaSuccess;
}
inline cudaError_t cudaGraphAddDependencies(cudaGraph_t, const cudaGraphNode_t*, const cudaGraphNode_t*,
                                            const cudaGraphEdgeData*, size_t) {
  return cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return delete graph, cudaSuccess; }
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  for (const auto& launch : *graph) launch();
  return cudaSuccess;
}
