// Enough of CUDA on the CPU to run the kernels of src/backend/cuda/kernels unchanged: the same .cu files are
// compiled as C++ with LILY_CUDA_EMULATED. Every thread of a cluster is a fiber of one OS thread; barriers
// and warp collectives switch between them. Checks indexing, barriers and arithmetic; knows nothing of time,
// caches or memory ordering. A barrier that some threads never reach aborts with a message; shared memory
// beyond what a launch asked for is a segmentation fault.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __restrict__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }

using cudaStream_t = void*;

namespace lily::cuda::emulated {

struct Group {  // threads that meet at a barrier
  int size = 0, arrived = 0;
  uint64_t generation = 0;
};

struct Warp {
  Group group;
  alignas(16) unsigned char slot[32][64];
};

struct Block {
  Group group;
  dim3 index;
  unsigned cluster_rank = 0;
  unsigned char* shared = nullptr;
  int votes[2] = {0, 0};  // of block_count, by parity of the barrier's generation
};

struct Thread {
  dim3 thread;
  Block* block = nullptr;
  Warp* warp = nullptr;
  unsigned lane = 0;
};

Thread& current();
dim3 grid_size();
dim3 block_size();
unsigned cluster_size();
void barrier(Group& group);
// For primitives that poll: lets other threads run, and tells the deadlock check that something moved.
void yield();
void progress();
Group& cluster_group();
unsigned char* cluster_shared(unsigned rank);

// Barriers of the copy engine. A copy happens when its barrier is first waited for, so that data used too
// early is seen to be missing; a wait for a phase that no copy completes aborts.
uint64_t new_mbarrier();
void expect(uint64_t barrier, unsigned bytes);
void bulk_copy(void* shared, const void* global, unsigned bytes, uint64_t barrier);
void wait(uint64_t barrier, unsigned parity);
// A store to a block's shared memory that counts as copied bytes at its barrier.
void send(void* shared, const void* value, unsigned bytes, uint64_t barrier);

// Runs body once for every thread of the grid, clusters one after another. While a graph is being captured
// it is kept for later instead.
void run_grid(dim3 grid, unsigned threads, unsigned cluster, size_t shared_bytes,
              const std::function<void()>& body);
using Graph = std::vector<std::function<void()>>;
void begin_capture();
Graph* end_capture();

}  // namespace lily::cuda::emulated

#define threadIdx (::lily::cuda::emulated::current().thread)
#define blockIdx (::lily::cuda::emulated::current().block->index)
#define gridDim (::lily::cuda::emulated::grid_size())
#define blockDim (::lily::cuda::emulated::block_size())
