// prefill_ops.h on the CPU. Copies and products happen at once, so a missing wait shows only on the device;
// barriers, indices, swizzles and descriptors are exercised as they are. Shared addresses are offsets in the
// block's memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "backend/cuda/kernels/device_ops.h"

#define __grid_constant__

namespace lily::cuda {

using std::max;
using std::min;
inline void require(bool holds, const char*) {
  if (!holds) abort();
}

inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - shared_memory());
}
inline void* shared_at(uint32_t address) { return shared_memory() + address; }
inline unsigned char* shared_pointer(uint32_t address) { return shared_memory() + address; }

struct EmulatedBarrier {
  int16_t arrivals, pending;
  uint32_t phase;
};
inline EmulatedBarrier& barrier_at(uint32_t address) {
  return *reinterpret_cast<EmulatedBarrier*>(shared_pointer(address));
}
inline void barrier_init(uint32_t barrier, int arrivals) {
  barrier_at(barrier) = {static_cast<int16_t>(arrivals), static_cast<int16_t>(arrivals), 0};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint32_t barrier) {
  EmulatedBarrier& b = barrier_at(barrier);
  if (b.pending <= 0) abort();
  if (--b.pending == 0) {
    b.pending = b.arrivals;
    ++b.phase;
    emulated::progress();
  }
}
inline void barrier_arrive_expect(uint32_t barrier, uint32_t) { barrier_arrive(barrier); }
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  while ((barrier_at(barrier).phase & 1u) == parity) emulated::yield();
}

inline emulated::Group& named_group(int id, int threads) {
  static emulated::Group groups[16];
  groups[id].size = threads;
  return groups[id];
}
inline void named_barrier(int id, int threads) { emulated::barrier(named_group(id, threads)); }
inline void named_barrier_arrive(int id, int threads) {
  emulated::Group& g = named_group(id, threads);
  if (++g.arrived == g.size) {
    g.arrived = 0;
    ++g.generation;
    emulated::progress();
  }
}

inline void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t) {
  if (bytes % 16 || to % 16 || reinterpret_cast<uintptr_t>(from) % 16) abort();
  memcpy(shared_pointer(to), from, bytes);
}
inline void copy_16(uint32_t to, const void* from) {
  if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16) abort();
  memcpy(shared_pointer(to), from, 16);
}
inline void copy_16_or_zero(uint32_t to, const void* from, bool valid) {
  if (valid) copy_16(to, from);
  else memset(shared_at(to), 0, 16);
}
inline void barrier_arrive_after_copies(uint32_t barrier) { barrier_arrive(barrier); }
inline void copies_commit() {}
template <int kPending>
inline void copies_wait() {}
inline void async_proxy_fence() {}

inline uint16_t shared_half(uint32_t address) {
  uint16_t x;
  memcpy(&x, shared_pointer(address), 2);
  return x;
}
inline void load_matrices_any(uint32_t (&r)[4], uint32_t address, bool transposed) {
  if (address % 16) abort();
  for (unsigned i = 0; i < 4; ++i) {
    uint32_t pair[2];
    for (unsigned e = 0; e < 2; ++e) {
      const unsigned fixed = lane_id() / 4, moving = 2 * (lane_id() % 4) + e;
      const unsigned row = transposed ? moving : fixed, col = transposed ? fixed : moving;
      pair[e] = shared_half(shuffle_from(address, 8 * i + row) + 2 * col);
    }
    r[i] = pair[0] | pair[1] << 16;
  }
}
inline void load_matrices(uint32_t (&r)[4], uint32_t address) { load_matrices_any(r, address, false); }
inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  load_matrices_any(r, address, true);
}
inline void store_matrices_transposed(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  if (address % 16) abort();
  const uint32_t r[4] = {r0, r1, r2, r3};
  for (unsigned i = 0; i < 4; ++i)
    for (unsigned e = 0; e < 2; ++e) {
      const uint32_t to = shuffle_from(address, 8 * i + 2 * (lane_id() % 4) + e) + 2 * (lane_id() / 4);
      const uint16_t x = static_cast<uint16_t>(r[i] >> (16 * e));
      memcpy(shared_pointer(to), &x, 2);
    }
  warp_sync();
}

// Where element (row along K or M, ...) of a descriptor's operand lies. Descriptor fields as the hardware
// reads them: address, leading and stride offsets in units of 16 bytes, 128-byte swizzle on address bits 4..6
// by bits 7..9.
inline uint32_t descriptor_element(uint64_t descriptor, int k, int mn, bool mn_major) {
  const uint32_t start = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
  const uint32_t leading = static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4;
  const uint32_t stride = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1) abort();
  const uint32_t linear =
      mn_major ? start + static_cast<uint32_t>(mn / 64) * leading + static_cast<uint32_t>(k / 8) * stride +
                     static_cast<uint32_t>(k % 8) * 128u + static_cast<uint32_t>(mn % 64) * 2u
               : start + static_cast<uint32_t>(mn / 8) * stride + static_cast<uint32_t>(mn % 8) * 128u +
                     static_cast<uint32_t>(k) * 2u;
  return linear ^ ((linear >> 7 & 7u) << 4);
}

struct WarpgroupSlot {
  emulated::Group group{128};
  float a[64][16];
};
inline WarpgroupSlot& warpgroup_slot() {
  static WarpgroupSlot slots[8];
  return slots[threadIdx.x / 128];
}
inline void wgmma_emulated(int n, float* d, uint64_t b_descriptor, int accumulate, bool n_major) {
  WarpgroupSlot& slot = warpgroup_slot();
  emulated::barrier(slot.group);
  const unsigned warp = threadIdx.x % 128 / 32, g = lane_id() / 4, t = lane_id() % 4;
  for (int j = 0; j < n / 8; ++j)
    for (unsigned e = 0; e < 2; ++e) {
      const int column = 8 * j + static_cast<int>(2 * t + e);
      float b[16];
      for (int k = 0; k < 16; ++k)
        b[k] = bf16_value(shared_half(descriptor_element(b_descriptor, k, column, n_major)));
      for (unsigned half = 0; half < 2; ++half) {
        const float* a = slot.a[16 * warp + g + 8 * half];
        double sum = 0;
        for (int k = 0; k < 16; ++k) sum += static_cast<double>(a[k]) * b[k];
        float& out = d[4 * j + static_cast<int>(2 * half + e)];
        out = static_cast<float>(sum + (accumulate ? out : 0.0f));
      }
    }
  emulated::barrier(slot.group);
}
template <int kN>
struct Wgmma {
  template <int kTransposeB = 0>
  static void rs(float* d, const uint32_t* a, uint64_t b_descriptor, int accumulate) {
    const unsigned warp = threadIdx.x % 128 / 32, g = lane_id() / 4, t = lane_id() % 4;
    for (unsigned i = 0; i < 4; ++i) {
      float* row = warpgroup_slot().a[16 * warp + g + 8 * (i % 2)];
      row[2 * t + 8 * (i / 2)] = bf16_low(a[i]);
      row[2 * t + 8 * (i / 2) + 1] = bf16_high(a[i]);
    }
    wgmma_emulated(kN, d, b_descriptor, accumulate, kTransposeB);
  }
};
inline void wgmma64_ss(float* d, uint64_t a_descriptor, uint64_t b_descriptor, int accumulate) {
  const int row = static_cast<int>(threadIdx.x % 128) / 2, first = threadIdx.x % 2 * 8;
  for (int k = first; k < first + 8; ++k)
    warpgroup_slot().a[row][k] = bf16_value(shared_half(descriptor_element(a_descriptor, k, row, false)));
  wgmma_emulated(64, d, b_descriptor, accumulate, false);
}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int kPending>
inline void wgmma_wait() {}
template <int kCount>
inline void registers_release() {}
template <int kCount>
inline void registers_claim() {}
inline void pin(float&) {}
inline void pin(uint32_t&) {}

inline uint32_t bf16x2_subtract_128(uint32_t x) { return bf16x2_fma(x, 0x3f803f80u, 0xc300c300u); }
inline float exp2_fast(float x) { return exp2f(x); }
inline float silu_fast(float x) { return x / (1.0f + expf(-x)); }

inline uint32_t warp_max_bits(uint32_t x) {
  for (unsigned m = 16; m; m >>= 1) x = std::max(x, shuffle_xor(x, m));
  return x;
}
inline uint32_t warp_min_bits(uint32_t x) {
  for (unsigned m = 16; m; m >>= 1) x = std::min(x, shuffle_xor(x, m));
  return x;
}
inline void count_up(int* counter) { ++*counter; }
inline uint32_t float_bits(float x) {
  uint32_t b;
  memcpy(&b, &x, 4);
  return b;
}
template <int kByte>
inline float byte_float(uint32_t x) {
  return static_cast<float>(x >> (8 * kByte) & 255u);
}

}  // namespace lily::cuda
