// The instructions that kernels use beyond plain C++, one function each: PTX on the device, plain C++ where
// the kernels run emulated on the CPU (tests/backend/cuda/emulation).
#pragma once

#include <cstdint>

#ifdef LILY_CUDA_EMULATED
#include "base/half.h"
#include "tests/backend/cuda/emulation/emulated_device.h"
#else
#include <cuda_runtime.h>
#endif

namespace lily::cuda {

// ---- bf16 as bits; two to a 32-bit word, the lower index in the lower half
__device__ __forceinline__ float bf16_low(uint32_t pair) {
  const uint32_t bits = pair << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
__device__ __forceinline__ float bf16_high(uint32_t pair) {
  const uint32_t bits = pair & 0xffff0000u;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
__device__ __forceinline__ float bf16_value(uint16_t bits) { return bf16_low(bits); }
__device__ __forceinline__ float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

#ifdef LILY_CUDA_EMULATED

inline uint32_t bf16_bits(float x) {
  uint32_t b;
  memcpy(&b, &x, 4);
  if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
}
inline uint32_t bf16_pair(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }

inline unsigned char* shared_memory() { return emulated::current().block->shared; }
inline unsigned lane_id() { return emulated::current().lane; }
inline void block_sync() { emulated::barrier(emulated::current().block->group); }
inline void warp_sync() { emulated::barrier(emulated::current().warp->group); }
inline void pdl_wait() {}
inline void pdl_trigger() {}

template <typename T>
inline T shuffle_from(T value, unsigned source) {
  emulated::Thread& t = emulated::current();
  memcpy(t.warp->slot[t.lane], &value, sizeof(T));
  emulated::barrier(t.warp->group);
  T result;
  memcpy(&result, t.warp->slot[source & 31], sizeof(T));
  emulated::barrier(t.warp->group);
  return result;
}
template <typename T>
inline T shuffle_xor(T value, unsigned mask) {
  return shuffle_from(value, lane_id() ^ mask);
}
inline uint32_t warp_ballot(bool vote) {
  uint32_t set = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    set |= static_cast<uint32_t>(shuffle_from<int>(vote, lane)) << lane;
  return set;
}
inline int count_bits(uint32_t x) { return __builtin_popcount(x); }
inline int lowest_bit(uint32_t x) { return __builtin_ctz(x); }
inline int block_count(bool vote) {  // threads of the block that vote, to all of them
  emulated::Block* b = emulated::current().block;
  int* const counter = &b->votes[b->group.generation & 1];
  b->votes[(b->group.generation + 1) & 1] = 0;
  *counter += vote;
  emulated::barrier(b->group);
  const int n = *counter;
  return n;
}

// D += A (16 x 16) * B (16 x 8), bf16 with fp32 accumulation; the fragment layout of mma.m16n8k16.
inline void mma_16816(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                      uint32_t b1) {
  emulated::Thread& t = emulated::current();
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(t.warp->slot[t.lane], mine, sizeof mine);
  emulated::barrier(t.warp->group);
  const auto word = [&](unsigned lane, int w) {
    uint32_t x;
    memcpy(&x, t.warp->slot[lane] + 4 * w, 4);
    return x;
  };
  const unsigned row = t.lane / 4, col = t.lane % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    const unsigned r = row + (i >= 2 ? 8 : 0), n = col + (i & 1);
    double sum = 0;
    for (unsigned k = 0; k < 16; ++k) {
      const uint32_t a = word(r % 8 * 4 + k % 8 / 2, (r >= 8 ? 1 : 0) + (k >= 8 ? 2 : 0));
      const uint32_t b = word(n * 4 + k % 8 / 2, k >= 8 ? 5 : 4);
      sum += static_cast<double>(k & 1 ? bf16_high(a) : bf16_low(a)) * (k & 1 ? bf16_high(b) : bf16_low(b));
    }
    c[i] = static_cast<float>(c[i] + sum);
  }
  emulated::barrier(t.warp->group);
}

// D += A (16 x 32, unsigned bytes) * B (32 x 8, signed bytes), exact; the fragment layout of mma.m16n8k32.
inline void mma_16832(int32_t (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                      uint32_t b1) {
  emulated::Thread& t = emulated::current();
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(t.warp->slot[t.lane], mine, sizeof mine);
  emulated::barrier(t.warp->group);
  const unsigned row = t.lane / 4, col = t.lane % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    const unsigned n = col + (i & 1);
    for (unsigned k = 0; k < 32; ++k) {
      const unsigned char* a =
          t.warp->slot[row * 4 + k % 16 / 4] + 4 * ((i >= 2 ? 1 : 0) + (k >= 16 ? 2 : 0));
      const unsigned char* b = t.warp->slot[n * 4 + k % 16 / 4] + 4 * (k >= 16 ? 5 : 4);
      c[i] += static_cast<int32_t>(a[k % 4]) * static_cast<signed char>(b[k % 4]);
    }
  }
  emulated::barrier(t.warp->group);
}

struct MBarrier {
  uint64_t id;
};
inline void mbarrier_init(MBarrier* b, unsigned) { b->id = emulated::new_mbarrier(); }
inline void mbarrier_init_fence() {}
inline void mbarrier_expect(MBarrier* b, unsigned bytes) { emulated::expect(b->id, bytes); }
inline void mbarrier_wait(MBarrier* b, unsigned parity) { emulated::wait(b->id, parity); }
inline void bulk_copy(void* shared, const void* global, unsigned bytes, MBarrier* b) {
  emulated::bulk_copy(shared, global, bytes, b->id);
}

inline unsigned cluster_rank() { return emulated::current().block->cluster_rank; }
inline void cluster_arrive() {}
inline void cluster_wait() { emulated::barrier(emulated::cluster_group()); }
template <typename T>
inline void cluster_send(float* shared, MBarrier* b, unsigned rank, T value) {  // float, float4
  const auto there = [&](const void* here) {
    return emulated::cluster_shared(rank) + (static_cast<const unsigned char*>(here) - shared_memory());
  };
  emulated::send(there(shared), &value, sizeof value, reinterpret_cast<MBarrier*>(there(b))->id);
}

inline uint4 load_l2(const uint4* p) { return *p; }
inline uint2 load_l2(const uint2* p) { return *p; }
inline float load_l2(const float* p) { return *p; }
inline float4 load_l2(const float4* p) { return *p; }
inline float4 load_last(const float4* p) { return *p; }
inline uint32_t load_l2(const uint32_t* p) { return *p; }
inline uint16_t load_l2(const uint16_t* p) { return *p; }
inline void store_to_host(uint64_t* p, uint64_t value) { *p = value; }
inline int shared_fetch_add(int* counter, int n) {
  const int old = *counter;
  *counter += n;
  return old;
}
inline void spin(unsigned) {}
inline unsigned fetch_add_acq_rel(unsigned* counter, unsigned n) {
  const unsigned old = *counter;
  *counter += n;
  return old;
}
inline int32_t round_to_int(float x) { return static_cast<int32_t>(lrintf(x)); }
inline float exp_fast(float x) { return expf(x); }
inline float divide_fast(float a, float b) { return a / b; }
inline float reciprocal_sqrt(float x) { return 1.0f / sqrtf(x); }
inline uint32_t multiply_high(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((uint64_t{a} * b) >> 32);
}
inline uint32_t pick_halves(uint32_t a, uint32_t b, bool high) {
  return high ? (a >> 16) | (b & 0xffff0000u) : (a & 0xffffu) | b << 16;
}
inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t r = 0;
  for (unsigned i = 0; i < 4; ++i)
    r |= static_cast<uint32_t>((uint64_t{b} << 32 | a) >> (8 * (selector >> (4 * i) & 7u)) & 255u) << (8 * i);
  return r;
}
inline uint32_t f16_bits(float x) { return to_f16(x).bits; }
inline float f16_value(uint32_t bits) { return to_float(F16{static_cast<uint16_t>(bits)}); }
inline uint32_t bf16x2_fma(uint32_t a, uint32_t b, uint32_t c) {
  const auto one = [](float x, float y, float z) {
    return static_cast<float>(static_cast<double>(x) * y + z);
  };
  return bf16_pair(one(bf16_low(a), bf16_low(b), bf16_low(c)), one(bf16_high(a), bf16_high(b), bf16_high(c)));
}

#else

__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ uint32_t bf16_bits(float x) { return bf16_pair(x, 0.0f) & 0xffffu; }

__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(128) unsigned char lily_shared[];
  return lily_shared;
}
__device__ __forceinline__ unsigned lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ void block_sync() { __syncthreads(); }
__device__ __forceinline__ void warp_sync() { __syncwarp(); }

// Programmatic dependent launch: everything before the wait may touch only memory that no unfinished kernel
// writes.
__device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void pdl_trigger() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

template <typename T>
__device__ __forceinline__ T shuffle_from(T value, unsigned source) {
  return __shfl_sync(~0u, value, source);
}
template <typename T>
__device__ __forceinline__ T shuffle_xor(T value, unsigned mask) {
  return __shfl_xor_sync(~0u, value, mask);
}
__device__ __forceinline__ uint32_t warp_ballot(bool vote) { return __ballot_sync(~0u, vote); }
__device__ __forceinline__ int count_bits(uint32_t x) { return __popc(x); }
__device__ __forceinline__ int lowest_bit(uint32_t x) { return __ffs(static_cast<int>(x)) - 1; }
__device__ __forceinline__ int block_count(bool vote) { return __syncthreads_count(vote); }

// D += A (16 x 16) * B (16 x 8), bf16 with fp32 accumulation.
__device__ __forceinline__ void mma_16816(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                          uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// D += A (16 x 32, unsigned bytes) * B (32 x 8, signed bytes), exact.
__device__ __forceinline__ void mma_16832(int32_t (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                          uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

struct MBarrier {
  uint64_t state;
};
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void mbarrier_init(MBarrier* b, unsigned arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives once and makes the barrier wait for so many copied bytes as well.
__device__ __forceinline__ void mbarrier_expect(MBarrier* b, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void mbarrier_wait(MBarrier* b, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}" ::"r"(shared_address(b)),
      "r"(parity)
      : "memory");
}
// Asynchronous copy of weights to shared memory; both addresses and the size are multiples of 16.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, unsigned bytes, MBarrier* b) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(b)), "l"(policy)
      : "memory");
}

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ void cluster_send(float* shared, MBarrier* b, unsigned rank, float4 value) {
  uint32_t to, at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(shared)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(b)), "r"(rank));
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          to),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(at)
      : "memory");
}
// A meeting in two halves whose first orders no memory, so that nothing is waited for.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
// Writes to the same place in the shared memory of another block of the cluster and counts as 4 copied bytes
// at that block's barrier: a message without a meeting, which would order all memory and take over a
// microsecond.
__device__ __forceinline__ void cluster_send(float* shared, MBarrier* b, unsigned rank, float value) {
  uint32_t to, at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(shared)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(b)), "r"(rank));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to),
               "f"(value), "r"(at)
               : "memory");
}

// Loads that bypass L1: data written by other kernels or blocks, or read once.
__device__ __forceinline__ uint4 load_l2(const uint4* p) { return __ldcg(p); }
__device__ __forceinline__ uint2 load_l2(const uint2* p) { return __ldcg(p); }
__device__ __forceinline__ float load_l2(const float* p) { return __ldcg(p); }
__device__ __forceinline__ float4 load_l2(const float4* p) { return __ldcg(p); }
// The last read of what lies there: the L2 may give its place away first.
__device__ __forceinline__ float4 load_last(const float4* p) {
  uint64_t policy;
  float4 v;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p), "l"(policy)
               : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_l2(const uint32_t* p) { return __ldcg(p); }
__device__ __forceinline__ uint16_t load_l2(const uint16_t* p) { return __ldcg(p); }
// One store that the host sees whole, when it has come: orders nothing else.
__device__ __forceinline__ void store_to_host(uint64_t* p, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
__device__ __forceinline__ int shared_fetch_add(int* counter, int n) { return atomicAdd(counter, n); }
// Lets so many clock cycles pass.
__device__ __forceinline__ void spin(unsigned cycles) {
  const long long until = clock64() + cycles;
  while (clock64() < until) {
  }
}
__device__ __forceinline__ unsigned fetch_add_acq_rel(unsigned* counter, unsigned n) {
  unsigned old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(n) : "memory");
  return old;
}
__device__ __forceinline__ int32_t round_to_int(float x) { return __float2int_rn(x); }
__device__ __forceinline__ float exp_fast(float x) { return __expf(x); }  // 2 ulp + 2^-21 |x| relative
__device__ __forceinline__ float divide_fast(float a, float b) { return __fdividef(a, b); }  // 2 ulp
__device__ __forceinline__ float reciprocal_sqrt(float x) { return rsqrtf(x); }
__device__ __forceinline__ uint32_t multiply_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }
// The low (or high) halves of two words as one word, a below b.
__device__ __forceinline__ uint32_t pick_halves(uint32_t a, uint32_t b, bool high) {
  return __byte_perm(a, b, high ? 0x7632 : 0x5410);
}
// Byte i of the result is the one of a's and b's eight that the selector's nibble i names.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}
__device__ __forceinline__ uint32_t f16_bits(float x) {  // rounded to nearest, ties to even
  uint16_t r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float f16_value(uint32_t bits) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(static_cast<uint16_t>(bits)));
  return r;
}
// Halves of a * b + c, each rounded once.
__device__ __forceinline__ uint32_t bf16x2_fma(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

#endif

// ---- built from the above
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int m = 16; m; m >>= 1) x += shuffle_xor(x, m);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int m = 16; m; m >>= 1) x = fmaxf(x, shuffle_xor(x, m));
  return x;
}
// Two values as pairs of bf16 whose sums have 16 bits of them.
__device__ __forceinline__ void bf16_parts(float a, float b, uint32_t& high, uint32_t& low) {
  high = bf16_pair(a, b);
  low = bf16_pair(a - bf16_low(high), b - bf16_high(high));
}
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }
// Within 4 ulp of bf16's 2^-9 by far; for values that are rounded to bf16.
__device__ __forceinline__ float silu_bf16(float x) { return divide_fast(x, 1.0f + exp_fast(-x)); }

}  // namespace lily::cuda
