// Instructions of Hopper that prefill kernels need beyond device_ops.h: barriers in shared memory,
// asynchronous copies, matrix loads, warpgroup products. On the device they are PTX; emulated, plain C++
// (prefill_ops_emulated.h). Shared memory is named by 32-bit addresses here.
#pragma once

#include "backend/cuda/kernels/device_ops.h"

#ifdef LILY_CUDA_EMULATED
#include "backend/cuda/kernels/prefill_ops_emulated.h"
#else
#include "backend/cuda/kernels/prefill_wgmma.cuh"
#include "backend/cuda/prefill_require.h"

namespace lily::cuda {

// The generic pointer of a shared address.
__device__ __forceinline__ void* shared_at(uint32_t address) { return __cvta_shared_to_generic(address); }

// ---- mbarrier: a phase ends when all expected arrivals and bytes have come; waiters name the phase's
// parity.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Threads of one role meet. Id 0 belongs to block_sync.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- copies into shared memory
// A multiple of 16 bytes through the bulk copy engine; they count on `barrier`.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void copy_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Writes 16 zero bytes where !valid; `from` is then not read.
__device__ __forceinline__ void copy_16_or_zero(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
// This thread's arrival at the barrier, once its copies so far have landed.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// Orders what this thread wrote or saw written to shared memory by ordinary instructions before later
// accesses by wgmma and the bulk copy engine. It waits for the thread's own copies in flight, so it belongs
// where they are read: a producer that executed it for each stage would serialise its copies.
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- 8 x 8 bf16 matrices between registers and shared memory: lane l names row l % 8 of matrix l / 8;
// register i of a lane holds elements [lane / 4][2 (lane % 4)] and the next of matrix i, or of its transpose.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, uint32_t r0, uint32_t r1,
                                                          uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// ---- warpgroup products. Operands must be pinned (see below) around the asynchronous part.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of a register across an asynchronous product.
__device__ __forceinline__ void pin(float& x) { asm volatile("" : "+f"(x)::"memory"); }
__device__ __forceinline__ void pin(uint32_t& x) { asm volatile("" : "+r"(x)::"memory"); }

// A warpgroup hands registers back, or takes what others handed back: the count a thread has from here on.
template <int kCount>
__device__ __forceinline__ void registers_release() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void registers_claim() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// ---- arithmetic on bf16 pairs, each half rounded once
__device__ __forceinline__ uint32_t bf16x2_subtract_128(uint32_t x) {
  uint32_t r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(0x3f803f80u), "r"(0xc300c300u));
  return r;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// x / (1 + exp(-x)) by the hardware's exponential and reciprocal: 2^-20 relative, far under the bf16 that
// follows.
__device__ __forceinline__ float silu_fast(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + exp2_fast(-1.4426950408889634f * x)));
  return x * r;
}

// ---- integers across a warp
__device__ __forceinline__ uint32_t warp_max_bits(uint32_t x) { return __reduce_max_sync(~0u, x); }
__device__ __forceinline__ uint32_t warp_min_bits(uint32_t x) { return __reduce_min_sync(~0u, x); }
__device__ __forceinline__ void count_up(int* counter) { atomicAdd(counter, 1); }
__device__ __forceinline__ uint32_t float_bits(float x) { return __float_as_uint(x); }
// Byte `i` of x as a float, exactly.
template <int kByte>
__device__ __forceinline__ float byte_float(uint32_t x) {
  return __uint_as_float(__byte_perm(x, 0x4b000000u, 0x7540 + kByte)) - 8388608.0f;
}

}  // namespace lily::cuda
#endif

namespace lily::cuda {

// Shared-memory tile of rows of 64 bf16 (128 bytes): 16-byte piece c of row r lies at piece c ^ (r % 8),
// which is what the descriptors below and conflict-free matrix loads expect. The tile is 1,024-byte aligned.
__device__ __forceinline__ uint32_t swizzled(uint32_t tile, int row, int piece) {
  return tile + static_cast<uint32_t>(row) * 128u + (static_cast<uint32_t>(piece ^ (row & 7)) << 4);
}
// The tile as an operand whose K runs along the 64 columns. `address`: the tile plus 32 bytes a k16 step.
__device__ __forceinline__ uint64_t k_major_descriptor(uint32_t address) {
  return uint64_t{(address & 0x3ffffu) >> 4} | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}
// The tile as an operand B whose K runs along the rows; the next 64 columns of N lie n_stride bytes further.
// `address`: the tile plus 2,048 bytes a k16 step.
__device__ __forceinline__ uint64_t n_major_descriptor(uint32_t address, uint32_t n_stride) {
  return uint64_t{(address & 0x3ffffu) >> 4} | uint64_t{n_stride >> 4} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}

// Dynamic shared memory from its first 1,024-byte boundary on: kernels ask for 1,024 bytes more than they lay
// out.
__device__ __forceinline__ unsigned char* aligned_shared_memory() {
  unsigned char* base = shared_memory();
  return base + ((1024u - (shared_address(base) & 1023u)) & 1023u);
}

__device__ __forceinline__ void unpack8(const uint4& piece, float (&x)[8]) {
  x[0] = bf16_low(piece.x), x[1] = bf16_high(piece.x), x[2] = bf16_low(piece.y), x[3] = bf16_high(piece.y);
  x[4] = bf16_low(piece.z), x[5] = bf16_high(piece.z), x[6] = bf16_low(piece.w), x[7] = bf16_high(piece.w);
}
__device__ __forceinline__ uint4 pack8(const float (&x)[8]) {
  return make_uint4(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]),
                    bf16_pair(x[6], x[7]));
}

}  // namespace lily::cuda
